"""What prompts find while two eviction policies duel: python -m benches.duels [TRACE]

Each load runs through the prefix index with `LeastRecentlyUsed`, with `LeastWorth`, and at last
with `BetterOfTwo`, which lets these two duel. The index runs without a model, with the id of a page
in the place of a token and a block of one byte in the place of a page. A prompt looks its pages up,
makes room, and caches all of them, or as many of its first ones as fit. Shares are of the prompts'
pages.

The made-up loads are unlike each other on purpose, and small. TRACE is a file of
https://github.com/kvcache-ai/Mooncake, such as synthetic_trace.jsonl, whose pages have 512 tokens:
each counts as two. All of it takes ten minutes of one core, the made-up loads alone three.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from benches.cached_pages import IndexedPages
from benches.results_file import write_result
from paged_kv.allocator.prefixes.eviction import (
    BETTER_OF_TWO,
    LEAST_RECENTLY_USED,
    LEAST_WORTH,
    EvictionPolicy,
)

POLICIES: dict[str, EvictionPolicy] = {
    "lru": LEAST_RECENTLY_USED,
    "worth": LEAST_WORTH,
    "better": BETTER_OF_TWO,
}
SIZES = (300, 1_000)
TRACE_SIZES = (2_000, 4_000, 8_000, 12_000, 20_000)
# Pages of the prompts of a made-up load.
PAGES = 60_000
PAGE_SIZE = 256

Prompt = list[int]
"""The ids of a prompt's pages. Equal ids have equal pages before them."""


class Maker:
    """Makes prompts up.

    Attributes:
        random: draws them, the same ones each time.
    """

    def __init__(self) -> None:
        self.random = Random(0)
        self._pages = 0

    def new(self, count: int) -> Prompt:
        """Pages that no prompt has yet."""
        self._pages += count
        return list(range(self._pages - count, self._pages))

    def talks(self, count: int, turns: int, most: int = 1) -> Iterator[Prompt]:
        """The prompts of so many conversations at once, `turns` in all. Each goes on with up to
        `most` pages, and one in 25 turns ends a conversation."""
        talks = [self.new(8) for _ in range(count)]
        for _ in range(turns):
            chosen = self.random.randrange(count)
            talks[chosen] = talks[chosen] + self.new(self.random.randint(1, most))
            yield talks[chosen]
            if self.random.randrange(25) == 0:
                talks[chosen] = self.new(8)


def scans(maker: Maker) -> Iterator[Prompt]:
    """Favourites, and between them prompts that come once."""
    favourites = [maker.new(10) for _ in range(150)]
    while True:
        chosen = int(maker.random.paretovariate(0.7)) - 1
        yield favourites[min(chosen, 149)] + maker.new(2)
        yield maker.new(12)


def loops(maker: Maker) -> Iterator[Prompt]:
    """The same documents in turns, with another question each time."""
    documents = [maker.new(12) for _ in range(60)]
    while True:
        yield from (document + maker.new(1) for document in documents)


def shifting_favourites(maker: Maker) -> Iterator[Prompt]:
    """Favourites that others replace after 400 prompts."""
    while True:
        favourites = [maker.new(10) for _ in range(60)]
        yield from (maker.random.choice(favourites) + maker.new(2) for _ in range(400))


def agents(maker: Maker) -> Iterator[Prompt]:
    """Conversations that grow and end."""
    while True:
        yield from maker.talks(24, PAGES, most=3)


def floods(maker: Maker) -> Iterator[Prompt]:
    """Conversations, and bursts of prompts that come once."""
    while True:
        yield from maker.talks(16, 150)
        yield from (maker.new(12) for _ in range(60))


def loops_and_agents(maker: Maker) -> Iterator[Prompt]:
    """Other documents in turns, then other conversations, and so on."""
    while True:
        documents = [maker.new(12) for _ in range(60)]
        yield from documents * 8
        yield from maker.talks(24, 600, most=2)


LOADS: dict[str, Callable[[Maker], Iterator[Prompt]]] = {
    each.__name__.replace("_", " "): each
    for each in (scans, loops, shifting_favourites, agents, floods, loops_and_agents)
}


def made_up(load: Callable[[Maker], Iterator[Prompt]]) -> list[Prompt]:
    """The first prompts of a load, of so many pages in all."""
    prompts: list[Prompt] = []
    pages = 0
    for prompt in load(Maker()):
        prompts.append(prompt)
        pages += len(prompt)
        if pages >= PAGES:
            break
    return prompts


def traced(file: Path) -> list[Prompt]:
    """The full pages of a trace's prompts."""
    requests = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        [page for id_ in each["hash_ids"] for page in (2 * id_, 2 * id_ + 1)][
            : each["input_length"] // PAGE_SIZE
        ]
        for each in requests
    ]


def share(prompts: list[Prompt], capacity: int, policy: EvictionPolicy) -> float:
    """The share of their pages that prompts find with a policy."""
    pages = IndexedPages(capacity, policy)
    return sum(map(pages.serve, prompts)) / sum(map(len, prompts))


def shares(name: str, prompts: list[Prompt], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Those shares by how many pages fit, and by policy."""
    found = {}
    for capacity in sizes:
        found[str(capacity)] = {
            policy: round(share(prompts, capacity, POLICIES[policy]), 4) for policy in POLICIES
        }
        print(f"{name:>20} {capacity:>7,} pages", found[str(capacity)], flush=True)
    return found


def main(files: list[str]) -> None:
    figures = {name: shares(name, made_up(load), SIZES) for name, load in LOADS.items()}
    for file in map(Path, files):
        figures[file.stem] = shares(file.stem, traced(file), TRACE_SIZES)
    write_result("duels", figures)


if __name__ == "__main__":
    main(sys.argv[1:2])
