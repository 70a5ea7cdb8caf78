"""Makes up the prompts of loads, and reads those of traces, as the ids of their pages.

A session of an agent is a conversation that it has with a model: each turn's prompt is the one
before, the answer to it, and what a tool has said. Sessions run at once, each one turn at a time,
and a new one takes the place of one that has ended. Of
https://github.com/vllm-project/vllm/issues/57103 are

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

The loads of a duel are unlike each other on purpose, and small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from math import exp, log
from pathlib import Path
from random import Random
from typing import NamedTuple

from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.trace import read_trace

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

# Pages of the prompts of a load of a duel.
DUEL_PAGES = 60_000

Pages = Sequence[int]
"""The ids of a prompt's full pages. Equal ids have equal pages before them."""


class Prompt(NamedTuple):
    """A prompt's length in tokens, and its pages."""

    tokens: int
    pages: Pages


def full_pages(tokens: int) -> int:
    """The pages of a prompt that others can share: each computes its last token itself."""
    return max(0, tokens - 1) // PAGE_SIZE


def traced_prompts(file: Path) -> list[Prompt]:
    """The prompts of a trace, in the order of their arrival."""
    ids: dict[tuple[int, int], int] = {}
    prompts = []
    for request in read_trace(file).requests:
        pages: list[int] = []
        for page in range(full_pages(request.prompt_length)):
            before = pages[-1] if pages else -1
            key = before, request.token(page * PAGE_SIZE)
            pages.append(ids.setdefault(key, len(ids)))
        prompts.append(Prompt(request.prompt_length, pages))
    return prompts


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


def agent_prompts(agents: int, requests: int) -> list[Prompt]:
    """So many prompts of so many sessions at once, in the order of their arrival."""
    run = _Run(agents)
    return [run.next_prompt() for _ in range(requests)]


class _Run:
    """Sessions that run at once, by the time of their next turns."""

    def __init__(self, agents: int) -> None:
        self._random = Random("agents of 0")
        self._page_ids = count()
        # The second number breaks ties, as sessions have no order.
        self._next = [(0, number, self._new_session()) for number in range(agents)]

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


class Maker:
    """Makes prompts up.

    Attributes:
        random: draws them, the same ones each time.
    """

    def __init__(self) -> None:
        self.random = Random(0)
        self._pages = 0

    def new(self, count: int) -> list[int]:
        """Pages that no prompt has yet."""
        self._pages += count
        return list(range(self._pages - count, self._pages))

    def talks(self, count: int, turns: int, most: int = 1) -> Iterator[list[int]]:
        """The prompts of so many conversations at once, `turns` in all. Each goes on with up to
        `most` pages, and one in 25 turns ends a conversation."""
        talks = [self.new(8) for _ in range(count)]
        for _ in range(turns):
            chosen = self.random.randrange(count)
            talks[chosen] = talks[chosen] + self.new(self.random.randint(1, most))
            yield talks[chosen]
            if self.random.randrange(25) == 0:
                talks[chosen] = self.new(8)


def scans(maker: Maker) -> Iterator[list[int]]:
    """Favourites, and between them prompts that come once."""
    favourites = [maker.new(10) for _ in range(150)]
    while True:
        chosen = int(maker.random.paretovariate(0.7)) - 1
        yield favourites[min(chosen, 149)] + maker.new(2)
        yield maker.new(12)


def loops(maker: Maker) -> Iterator[list[int]]:
    """The same documents in turns, with another question each time."""
    documents = [maker.new(12) for _ in range(60)]
    while True:
        yield from (document + maker.new(1) for document in documents)


def shifting_favourites(maker: Maker) -> Iterator[list[int]]:
    """Favourites that others replace after 400 prompts."""
    while True:
        favourites = [maker.new(10) for _ in range(60)]
        yield from (maker.random.choice(favourites) + maker.new(2) for _ in range(400))


def agents(maker: Maker) -> Iterator[list[int]]:
    """Conversations that grow and end."""
    while True:
        yield from maker.talks(24, DUEL_PAGES, most=3)


def floods(maker: Maker) -> Iterator[list[int]]:
    """Conversations, and bursts of prompts that come once."""
    while True:
        yield from maker.talks(16, 150)
        yield from (maker.new(12) for _ in range(60))


def loops_and_agents(maker: Maker) -> Iterator[list[int]]:
    """Other documents in turns, then other conversations, and so on."""
    while True:
        documents = [maker.new(12) for _ in range(60)]
        yield from documents * 8
        yield from maker.talks(24, 600, most=2)


DUEL_LOADS: dict[str, Callable[[Maker], Iterator[list[int]]]] = {
    each.__name__.replace("_", " "): each
    for each in (scans, loops, shifting_favourites, agents, floods, loops_and_agents)
}


def duel_load(load: Callable[[Maker], Iterator[list[int]]]) -> list[list[int]]:
    """The first prompts of a load, of so many pages in all."""
    prompts: list[list[int]] = []
    pages = 0
    for prompt in load(Maker()):
        prompts.append(prompt)
        pages += len(prompt)
        if pages >= DUEL_PAGES:
            break
    return prompts
