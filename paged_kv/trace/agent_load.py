"""Makes up the requests of coding agents and writes them as a trace.

A session is a conversation that an agent has with a model: each turn's prompt is the one before,
the answer to it, and what a tool has said. Sessions run at once, each one turn at a time, and a new
one takes the place of one that has ended. Of https://github.com/vllm-project/vllm/issues/57103 are

    43 turns           a session, the median
    142K tokens        of the prompt of a session's last turn, the median
    444 tokens         that a turn generates, the median
    over 96 %          of a prompt's tokens are those of the turn before
    44 %               of sessions have sub-agents, which begin with their parent's prompt

The issue does not say how numbers spread around their medians, nor how long sub-agents and tools
run. These are made up: lognormal turns and answers, exponential outputs of tools, first prompts of
30K tokens (much shorter ones, and less than 96 % would be shared), one sub-agent a session at most,
for which its parent waits, and 5 seconds a tool, the mean. Sessions share nothing with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp, log
from pathlib import Path
from random import Random

from paged_kv.trace.request_lines import RequestLines, TracedMemory, duration_ms, full_pages

TURNS = 43
LAST_PROMPT = 142_000
ANSWER = 444
BRANCHING = 0.44

FIRST_PROMPT = 30_000
TURNS_SPREAD, ANSWER_SPREAD = 0.5, 0.8
SUB_AGENT_TURNS = 10
TOOL_MS = 5_000

# A lognormal number's mean, and what is left for the tool of the tokens that a turn adds.
_ANSWER_MEAN = ANSWER * exp(ANSWER_SPREAD**2 / 2)
_TOOL_OUTPUT = (LAST_PROMPT - FIRST_PROMPT) / (TURNS - 1) - _ANSWER_MEAN


@dataclass(frozen=True)
class AgentLoad:
    """The parameters of a load; equal parameters give equal loads.

    Attributes:
        agents: how many sessions run at once.
        requests: how many requests come in all.
        seed: draws everything that spreads.
    """

    agents: int
    requests: int
    seed: int = 0


@dataclass
class _Session:
    """A session, or a sub-agent's.

    Attributes:
        prompt: tokens of the next turn's prompt.
        turns: how many are left.
        like: the request whose prompt the next one begins with; none in a new session.
        shared: how many first pages that are.
        branches_at: turns that are left when a sub-agent begins; 0 if none does.
        parent: the session that waits until this one ends.
    """

    prompt: int
    turns: int
    like: int = 0
    shared: int = 0
    branches_at: int = 0
    parent: _Session | None = None


def write_agent_load(load: AgentLoad, memory: TracedMemory, path: Path) -> None:
    """Write the trace of a load.

    Raises:
        OSError: the file cannot be written, or is not empty.
    """
    file = RequestLines(path, memory, "agents")
    _Run(load, file).finish()
    file.finish()


class _Run:
    """One run of a load: the sessions, by the time of their next turns."""

    def __init__(self, load: AgentLoad, file: RequestLines) -> None:
        self._file = file
        self._random = Random(f"agents of {load.seed}")
        self._requests = load.requests
        # The second number breaks ties, as sessions have no order.
        self._next = [(0, number, self._new_session()) for number in range(load.agents)]

    def finish(self) -> None:
        """Write the next turn of any session, as many times as there are requests."""
        for _ in range(self._requests):
            now, place, session = heappop(self._next)
            ends = self._turn(now, session) + round(self._random.expovariate(1 / TOOL_MS))
            heappush(self._next, (ends, place, self._after(session)))

    def _turn(self, now: int, session: _Session) -> int:
        """Write a turn; returns when it ends."""
        prompt, answer = session.prompt, self._about(ANSWER, ANSWER_SPREAD)
        session.like = self._file.arrive(now, prompt, answer, session.like, session.shared)
        session.shared = full_pages(prompt)
        session.prompt += answer + self._tool_output()
        session.turns -= 1
        return now + duration_ms(prompt, answer)

    def _after(self, session: _Session) -> _Session:
        """The session that has the next turn in the place of this one."""
        if session.turns and session.turns == session.branches_at:
            turns = self._about(SUB_AGENT_TURNS, TURNS_SPREAD)
            return _Session(session.prompt, turns, session.like, session.shared, parent=session)
        if session.turns:
            return session
        return session.parent or self._new_session()

    def _new_session(self) -> _Session:
        turns = self._about(TURNS, TURNS_SPREAD)
        session = _Session(FIRST_PROMPT + self._tool_output(), turns)
        if turns > 1 and self._random.random() < BRANCHING:
            session.branches_at = self._random.randrange(1, turns)
        return session

    def _about(self, median: int, spread: float) -> int:
        return max(1, round(self._random.lognormvariate(log(median), spread)))

    def _tool_output(self) -> int:
        return max(1, round(self._random.expovariate(1 / _TOOL_OUTPUT)))
