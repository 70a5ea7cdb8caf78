"""The memory that is promised to sequences is available, whatever is cached, forked or mapped."""

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagePool, Sequence
from paged_kv.admission.pool_size import Growth, has_room
from paged_kv.cache.saved_state import page_views
from paged_kv.pool.layer_kinds import Window
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.steps.batch import Batch
from tests.support.full_pages import full_formats

# Quantised pages need heads of whole groups of 32.
DIMS = (32, 64)


slow = partial(pytest.param, marks=pytest.mark.slow)
soak = partial(pytest.param, marks=pytest.mark.soak)


@dataclass(eq=False)
class Row:
    tokens: list[int]
    sequence: Sequence

    @property
    def is_done(self) -> bool:
        return self.sequence.length >= len(self.tokens)

    @property
    def growth(self) -> Growth:
        tables = self.sequence.tables.values()
        held = max([self.sequence.length, *[table.tokens for table in tables]])
        return Growth(held, self.sequence.length, len(self.tokens)).with_reserve(1)


def write(pool: PagePool, sequence: Sequence, count: int) -> None:
    """A step of one sequence, through layers of different size."""
    for layer in range(pool.num_layers):
        numbers = mx.zeros((1, 1, count, DIMS[layer % 2]), mx.float16)
        Batch.of(pool, [sequence]).append(layer, numbers, numbers)
        mx.eval(page_views(pool, layer, sequence))


def begun(prefixes: PrefixCache, tokens: list[int]) -> Row:
    return Row(tokens, prefixes.fetch("", tokens, prefixes.pool.page_format).sequence)


def opened(windows: dict[int, Window], budget_blocks: int, page_format: Any) -> PagePool:
    """A pool of two layers that has been written once."""
    block = 256 * sum(DIMS) * 2 * 2
    max_bytes = budget_blocks * block
    pool = PagePool(2, windows=windows, max_bytes=max_bytes, page_format=page_format)
    write(pool, Sequence(pool), 1)
    pool.clear()
    return pool


@pytest.mark.parametrize("page_format", ["q8", "q4", "q8/q4"])
def test_what_a_sequence_needs_is_what_it_comes_to_hold(page_format: str) -> None:
    pool = opened({}, 40, page_format)
    (group,) = pool.groups
    sequence, most = Sequence(pool), Counter[str]()
    for tokens in range(128, 1537, 128):
        write(pool, sequence, 128)
        most |= Counter({each.name: each.num_used for each in group.allocator.formats})
        full = Counter(full_formats(page_format, (tokens - 1) // 256))
        assert most - Counter({"fp16": most["fp16"]}) == full
        needs = group.needs_of(tokens)
        assert not most - needs, "it holds more than it needs"
        assert needs - Counter({"fp16": needs["fp16"]}) == full


@pytest.mark.parametrize(
    ("budget_blocks", "page_format", "windows"),
    [
        (9, "fp16", {1: Window(300, 200)}),
        slow(40, "fp16", {}),
        slow(20, "auto", {1: Window(300, 200)}),
        soak(60, "auto", {0: Window(256, 100)}),
        soak(60, "auto", {}),
        slow(30, "q4", {1: Window(300, 200)}),
        soak(40, "q4", {0: Window(256, 100)}),
    ],
)
@pytest.mark.slow
def test_no_step_of_what_was_promised_exhausts_a_pool(
    budget_blocks: int, page_format: str, windows: dict[int, Window]
) -> None:
    rng = random.Random(budget_blocks)
    pool = opened(windows, budget_blocks, page_format)
    size = pool.size
    prefixes = PrefixCache(pool, has_states=False)
    rows: list[Row] = []
    tokens: list[int] = []
    served = serial = 0
    for _ in range(150 if page_format == "fp16" else 250):
        if not tokens:
            length = rng.randrange(1, int(size.longest))
            # Prompts that share a prefix and part in the middle of a page.
            serial += 1
            half = length // 2
            tokens = [*[rng.randrange(3)] * half, *range(length - half - 1), -serial]
        growths, needed = [row.growth for row in rows], size.bytes_for(len(tokens))
        if not rows or has_room(needed, growths, size, pool.bytes_active):
            rows.append(begun(prefixes, tokens))
            # It copies the last page that it has found, if that is not full.
            write(pool, rows[-1].sequence, 1)
            served, tokens = served + 1, []
        for row in rng.sample(rows, len(rows) // 2 + len(rows) % 2):
            left = len(row.tokens) - row.sequence.length
            if left:
                write(pool, row.sequence, min(left, rng.randrange(1, 400)))
            if rng.random() < 0.3 or row.is_done:
                prefixes.insert("", row.tokens[: row.sequence.length], row.sequence, None)
            if row.is_done or rng.random() < 0.05:
                rows.remove(row)
        del row
        pool.check()
    assert served > 5
    stats = pool.stats()
    assert stats.allocation_failures == 0
    assert stats.evictions["room"] > 0
    rows.clear()
    pool.clear()
    assert pool.stats().blocks_used == 0
