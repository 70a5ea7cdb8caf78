"""Layers with a window beside lists of all tokens, and attention over them beside a dense one."""

import gc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from paged_kv import PagedKVCache, PagePool, PoolExhausted
from paged_kv.allocator.errors import RollbackError
from paged_kv.window import Window
from tests import ring_batches
from tests.books import assert_books_balance
from tests.examples import examples
from tests.layer_caches import filter_rows
from tests.ring_batches import PAGE_BYTES, Batch, append, assert_holds, new_batch, saved_and_loaded

LAYERS = 3
WINDOWS = [Window(300, 100), Window(256, 256), Window(20, 20), Window(20, 3), Window(1, 1)]
COUNTS = st.sampled_from([1, 1, 1, 3, 19, 20, 21, 100, 101, 256, 700, 2048])
NUMBERS = st.lists(st.integers(0, 400), min_size=4, max_size=4)
LONGEST, MOST_ROWS = 6000, 4


class RingMachine(RuleBasedStateMachine):
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.held: list[Batch] = []

    @initialize(windows=st.tuples(st.sampled_from(WINDOWS), st.sampled_from(WINDOWS)))
    def open(self, windows: tuple[Window, Window]) -> None:
        # Enough for a few sequences, so that the pool is exhausted now and then.
        both = dict(enumerate(windows, start=1))
        self.pool = PagePool(LAYERS, windows=both, max_bytes=400 * PAGE_BYTES)
        self.windows = windows

    def hold(self, batch: Batch) -> Batch:
        self.held.append(batch)
        return batch

    @rule(target=batches, rows=st.integers(1, 3))
    def begin(self, rows: int) -> Batch:
        return self.hold(new_batch(self.pool, rows))

    @rule(batch=batches, count=COUNTS, names_window=st.booleans())
    def step(self, batch: Batch, count: int, names_window: bool) -> None:
        if batch.rows and max(len(row.tokens) for row in batch.rows) + count <= LONGEST:
            append(batch, count)

    @rule(batch=batches, lengths=NUMBERS, longer=st.booleans())
    def ragged_step(self, batch: Batch, lengths: list[int], longer: bool) -> None:
        lengths = [length * (3 if longer else 1) for length in lengths[: len(batch.rows)]]
        if any(lengths) and max(len(row.tokens) for row in batch.rows) + 1200 <= LONGEST:
            append(batch, max(lengths), lengths)

    @rule(batch=batches, counts=NUMBERS, within=st.booleans())
    def trim(self, batch: Batch, counts: list[int], within: bool) -> None:
        counts = counts[: len(batch.rows)]
        possible = [row.rollback(self.windows) for row in batch.rows]
        if within:
            counts = [min(pair) for pair in zip(counts, possible, strict=True)]
        allowed = all(
            min(count, len(row.tokens)) <= most
            for row, count, most in zip(batch.rows, counts, possible, strict=True)
        )
        if allowed:
            for cache in batch.layers:
                cache.trim_per_sequence(counts)
            for row, count in zip(batch.rows, counts, strict=True):
                row.trim(count)
        else:
            self.refused(batch, counts)

    def refused(self, batch: Batch, counts: list[int]) -> None:
        pairs = zip(counts, batch.rows, strict=True)
        possible = {(count, row.rollback(self.windows)) for count, row in pairs}
        for cache in batch.layers:
            with pytest.raises(RollbackError) as raised:
                cache.trim_per_sequence(counts)
            assert (raised.value.asked, raised.value.possible) in possible

    @rule(batch=batches)
    def ask(self, batch: Batch) -> None:
        possible = [row.rollback(self.windows) for row in batch.rows]
        for cache in batch.layers:
            pairs = list(zip(possible, batch.rows, strict=True))
            for n in (0, 1, *possible, *(most + 1 for most in possible)):
                answer = all(min(n, len(row.tokens)) <= most for most, row in pairs)
                assert cache.can_trim(n) == answer

    @rule(target=batches, batch=batches)
    def fork(self, batch: Batch) -> Batch:
        return self.hold(ring_batches.fork(batch))

    @rule(target=batches, batch=batches)
    def save_and_load(self, batch: Batch) -> Batch | object:
        if not batch.rows or not all(row.tokens for row in batch.rows):
            return multiple()
        try:
            return self.hold(saved_and_loaded(batch))
        except PoolExhausted:
            return multiple()

    @rule(target=batches, batch=batches, index=st.integers(0, 3))
    def extract(self, batch: Batch, index: int) -> Batch | object:
        if not batch.rows:
            return multiple()
        index %= len(batch.rows)
        layers = [cache.extract(index) for cache in batch.layers]
        return self.hold(Batch(layers, [batch.rows[index].copy()]))

    @rule(target=batches, first=batches, second=batches)
    def merge(self, first: Batch, second: Batch) -> Batch | object:
        if len(first.rows) + len(second.rows) > MOST_ROWS:
            return multiple()
        pairs = zip(first.layers, second.layers, strict=True)
        layers = [PagedKVCache.merge([one, other]) for one, other in pairs]
        return self.hold(Batch(layers, [row.copy() for row in first.rows + second.rows]))

    @rule(batch=batches, other=consumes(batches))
    def extend(self, batch: Batch, other: Batch) -> None:
        if batch is other or len(batch.rows) + len(other.rows) > MOST_ROWS:
            return
        for cache, more in zip(batch.layers, other.layers, strict=True):
            cache.extend(more)
        batch.rows += other.rows
        self.held.remove(other)
        other.layers.clear()

    @rule(batch=batches, indices=st.lists(st.integers(0, 3), max_size=3))
    def filter(self, batch: Batch, indices: list[int]) -> None:
        kept = filter_rows(batch.layers, len(batch.rows), indices)
        batch.rows = [batch.rows[index].copy() for index in kept]

    @rule(batch=consumes(batches))
    def drop(self, batch: Batch) -> None:
        self.held = [other for other in self.held if other is not batch]
        batch.layers.clear()

    @rule()
    def compact(self) -> None:
        self.pool.compact()

    @rule()
    def look(self) -> None:
        """Not after every step: reading what a batch no longer holds as one step writes it."""
        for batch in self.held:
            for cache in batch.layers if any(row.tokens for row in batch.rows) else []:
                assert_holds(cache, batch.rows)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert_books_balance(self.pool.stats(), self.pool.budget.mapped)

    def teardown(self) -> None:
        self.look()
        for batch in self.held:
            batch.layers.clear()
        gc.collect()
        self.books_agree()
        assert self.pool.stats().blocks_used == 0


TestRings = RingMachine.TestCase
TestRings.settings = examples(20, stateful_step_count=30)
