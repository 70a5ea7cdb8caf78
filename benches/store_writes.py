"""Replays loads to choose which prefixes a store should write: python -m benches.store_writes

Each load is a week of requests, drawn from a seed:

    chat        3,000 conversations of 2.0 turns, questions of 70 and answers of 215 tokens, as in
                LMSYS-Chat-1M on the mean, behind a system prompt of 300 tokens
    agents      60 sessions of 20 turns, with 600 tokens of tools' output and answers of 150, behind
                one of two system prompts of 6,000 tokens
    documents   750 documents of 8,000 tokens, about which 1.4 questions are asked
    mixed       all of these

Lengths are log-normal, numbers of turns geometric; one turn in 20 comes hours later. No model runs:
blocks of 256 tokens go through an LRU memory of the given number of tokens, the
`LookupCounts` and `StoreOptions` of the store, and a disk without a limit. As in the store, full
blocks are written at insertion, and partly filled ones never.

    hits     tokens of prompts that are in memory or on disk, beside those of the rule that writes
             everything
    bytes    blocks that are written, beside those of that rule
"""

import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xxhash import xxh64_hexdigest

from benches.results_file import write_result
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.store.keys import LookupCounts
from paged_kv.store.options import StoreOptions

WEEK_S = 7 * 86_400
MEMORY_TOKENS = (32_768, 131_072, 524_288)
RULES = {
    "everything": StoreOptions(),
    "second sight": StoreOptions(after=2),
    "third sight": StoreOptions(after=3),
    **{
        f"second sight, {length:,} tokens at once": StoreOptions(after=2, at_once=length)
        for length in (32_768, 16_384, 4_096)
    },
}


@dataclass(frozen=True)
class Request:
    """A prompt, and the answer that makes it longer. Its first `shared` tokens are those of all
    conversations of the same `group`."""

    at: float
    conversation: tuple[str, int]
    group: tuple[str, int]
    shared: int
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer."""
        return self.prompt + self.answer

    def digest(self, block: int) -> str:
        """Names a full block of the conversation."""
        owner = self.group if (block + 1) * PAGE_SIZE <= self.shared else self.conversation
        return xxh64_hexdigest(f"{owner} {block}")


@dataclass(frozen=True)
class Kind:
    """What conversations of a load are like; lengths in tokens are means."""

    count: int
    turns: float
    system: int
    groups: int
    first: int
    question: int
    answer: int
    pause_s: float


KINDS = {
    "chat": Kind(3_000, 2.0, 300, 1, 70, 70, 215, 60),
    "agents": Kind(60, 20.0, 6_000, 2, 400, 600, 150, 15),
    "documents": Kind(750, 1.4, 0, 1, 8_000, 50, 200, 120),
}
HOURS_LATER_S = 20_000.0


def main() -> None:
    """Replay all loads under all rules."""
    loads = {name: list(requests(name)) for name in KINDS}
    loads["mixed"] = [request for load in loads.values() for request in load]
    figures: dict[str, Any] = {"rules": list(RULES), "loads": {}}
    for name, load in loads.items():
        load.sort(key=lambda each: each.at)
        figures["loads"][name] = {
            "requests": len(load),
            "prompt_tokens": sum(each.prompt for each in load),
            "memory": {str(tokens): compared(load, tokens) for tokens in MEMORY_TOKENS},
        }
    write_result("store_writes", figures)


def requests(name: str) -> Iterator[Request]:
    """The requests of a load."""
    rng, kind = random.Random(name), KINDS[name]

    def tokens(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0)))

    for number in range(kind.count):
        at, length, group = rng.uniform(0, WEEK_S), kind.system, rng.randrange(kind.groups)
        turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / kind.turns))
        for turn in range(turns):
            length += tokens(kind.question if turn else kind.first)
            answer = tokens(kind.answer)
            yield Request(at, (name, number), (name, -1 - group), kind.system, length, answer)
            length += answer
            at += tokens(HOURS_LATER_S if rng.random() < 0.05 else kind.pause_s)


def compared(load: list[Request], memory_tokens: int) -> dict[str, dict[str, float]]:
    """Hits and bytes of each rule, beside those of the first."""
    found = {name: replayed(load, memory_tokens, rule) for name, rule in RULES.items()}
    everything = found["everything"]
    return {
        name: {
            "hits": hits / everything[0],
            "bytes": written / everything[1],
            "hit_rate": hits * PAGE_SIZE / sum(each.prompt for each in load),
            "blocks_written": written,
        }
        for name, (hits, written) in found.items()
    }


def replayed(load: list[Request], memory_tokens: int, rule: StoreOptions) -> tuple[int, int]:
    """The blocks that prompts find, and those that are written."""
    memory: OrderedDict[str, None] = OrderedDict()
    disk: set[str] = set()
    counts, hits = LookupCounts(), 0
    for request in load:
        prompt = [request.digest(block) for block in range(request.prompt // PAGE_SIZE)]
        held = next(
            (at for at, each in enumerate(prompt) if each not in memory and each not in disk),
            len(prompt),
        )
        hits += held
        for digest in prompt:
            counts.record(digest)
        for block in range(request.length // PAGE_SIZE):
            digest = request.digest(block)
            if not counts[digest]:
                counts.record(digest)
            if rule.is_due(counts[digest], request.length):
                disk.add(digest)
            memory[digest] = None
            memory.move_to_end(digest)
        while len(memory) * PAGE_SIZE > memory_tokens:
            memory.popitem(last=False)
    return hits, len(disk)


if __name__ == "__main__":
    main()
