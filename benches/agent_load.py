"""Makes up the requests of coding agents, for `benches.eviction`.

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
A request takes `STEP_MS` for a generated token, and for a step of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from math import exp, log
from random import Random

from benches.page_prompts import Prompt, full_pages

TURNS = 43
LAST_PROMPT = 142_000
ANSWER = 444
BRANCHING = 0.44

FIRST_PROMPT = 30_000
TURNS_SPREAD, ANSWER_SPREAD = 0.5, 0.8
SUB_AGENT_TURNS = 10
TOOL_MS = 5_000
# About what a model of 8 billion parameters takes on one GPU while others run beside it.
STEP_MS, STEP_TOKENS = 30, 2048

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
        pages: the ids of the full pages that the next turn's prompt begins with.
        branches_at: turns that are left when a sub-agent begins; 0 if none does.
        parent: the session that waits until this one ends.
    """

    prompt: int
    turns: int
    pages: tuple[int, ...] = ()
    branches_at: int = 0
    parent: _Session | None = None


def agent_prompts(load: AgentLoad) -> list[Prompt]:
    """The prompts of a load, in the order of their arrival."""
    run = _Run(load)
    return [run.next_prompt() for _ in range(load.requests)]


class _Run:
    """One run of a load: the sessions, by the time of their next turns."""

    def __init__(self, load: AgentLoad) -> None:
        self._random = Random(f"agents of {load.seed}")
        self._page_ids = count()
        # The second number breaks ties, as sessions have no order.
        self._next = [(0, number, self._new_session()) for number in range(load.agents)]

    def next_prompt(self) -> Prompt:
        """The prompt of the next turn of any session."""
        now, place, session = heappop(self._next)
        tokens, answer = session.prompt, self._about(ANSWER, ANSWER_SPREAD)
        new = full_pages(tokens) - len(session.pages)
        session.pages += tuple(islice(self._page_ids, new))
        session.prompt += answer + self._tool_output()
        session.turns -= 1
        ends = now + STEP_MS * (-(-tokens // STEP_TOKENS) + answer)
        ends += round(self._random.expovariate(1 / TOOL_MS))
        prompt = Prompt(tokens, session.pages)
        heappush(self._next, (ends, place, self._after(session)))
        return prompt

    def _after(self, session: _Session) -> _Session:
        """The session that has the next turn in the place of this one."""
        if session.turns and session.turns == session.branches_at:
            turns = self._about(SUB_AGENT_TURNS, TURNS_SPREAD)
            return _Session(session.prompt, turns, session.pages, parent=session)
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
