"""Random use of batches of caches, beside lists that say what every row must hold."""

import copy
import gc
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from paged_kv import PagedKVCache, PagePool, PoolExhausted, Sequence
from tests.books import assert_books_balance, live_rows, used_rows
from tests.examples import examples
from tests.layer_caches import filter_rows, ragged_step

LAYERS = 2
PAGE_BYTES = LAYERS * 2 * 256 * 2 * 4
# Enough for some, so that the pool is exhausted now and then.
MAX_BYTES = 24 * PAGE_BYTES
COUNTS = st.sampled_from([1, 2, 3, 120, 255, 256, 257, 300])


@dataclass(eq=False)
class Batch:
    """A cache for each layer, and the tokens that each row must hold."""

    layers: list[PagedKVCache]
    rows: list[list[int]]


class CacheMachine(RuleBasedStateMachine):
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(LAYERS, max_bytes=MAX_BYTES)
        self.held: list[Batch] = []
        self.next_token = 1

    def hold(self, layers: list[PagedKVCache], rows: list[list[int]]) -> Batch:
        batch = Batch(layers, [list(row) for row in rows])
        self.held.append(batch)
        return batch

    def fresh_tokens(self, count: int, rows: int) -> list[list[int]]:
        first = self.next_token
        self.next_token += count * rows
        return [list(range(first + count * row, first + count * (row + 1))) for row in range(rows)]

    def write(self, batch: Batch, tokens: list[list[int]]) -> bool:
        """Write into every layer; false, and nothing written in any, if the pool is full."""
        numbers = mx.array(tokens, dtype=mx.float32)[:, None, :, None]
        try:
            for layer, cache in enumerate(batch.layers):
                keys = mx.broadcast_to(numbers + layer / 4, (len(tokens), 1, len(tokens[0]), 2))
                cache.update_and_fetch(keys, keys + 0.125)
        except PoolExhausted:
            return False
        return True

    @rule(target=batches, rows=st.integers(1, 3))
    def begin(self, rows: int) -> Batch:
        sequences = [Sequence(self.pool) for _ in range(rows)]
        layers = [PagedKVCache(self.pool, layer, list(sequences)) for layer in range(LAYERS)]
        return self.hold(layers, [[] for _ in range(rows)])

    @rule(batch=batches, count=COUNTS)
    def append(self, batch: Batch, count: int) -> None:
        if batch.rows:
            tokens = self.fresh_tokens(count, len(batch.rows))
            if self.write(batch, tokens):
                for row, more in zip(batch.rows, tokens, strict=True):
                    row += more

    @rule(batch=batches, lengths=st.lists(st.integers(0, 300), min_size=9, max_size=9))
    def append_ragged(self, batch: Batch, lengths: list[int]) -> None:
        lengths = lengths[: len(batch.rows)]
        if not any(lengths):
            return
        tokens = self.fresh_tokens(max(lengths), len(lengths))
        with ragged_step(batch.layers, lengths):
            written = self.write(batch, tokens)
        if written:
            for row, more, length in zip(batch.rows, tokens, lengths, strict=True):
                row += more[:length]

    @rule(batch=batches, counts=st.lists(st.integers(0, 400), min_size=9, max_size=9))
    def trim(self, batch: Batch, counts: list[int]) -> None:
        counts = counts[: len(batch.rows)]
        for cache in batch.layers:
            cache.trim_per_sequence(counts)
        for row, count in zip(batch.rows, counts, strict=True):
            del row[max(0, len(row) - count) :]

    @rule(target=batches, batch=batches)
    def fork(self, batch: Batch) -> Batch:
        return self.hold(copy.deepcopy(batch.layers), batch.rows)

    @rule(target=batches, batch=batches, index=st.integers(0, 8))
    def extract(self, batch: Batch, index: int) -> Batch | object:
        if not batch.rows:
            return multiple()
        index %= len(batch.rows)
        layers = [cache.extract(index) for cache in batch.layers]
        return self.hold(layers, [batch.rows[index]])

    @rule(target=batches, first=batches, second=batches)
    def merge(self, first: Batch, second: Batch) -> Batch | object:
        if len(first.rows) + len(second.rows) > 6:
            return multiple()
        pairs = zip(first.layers, second.layers, strict=True)
        layers = [PagedKVCache.merge([one, other]) for one, other in pairs]
        return self.hold(layers, first.rows + second.rows)

    @rule(batch=batches, other=consumes(batches))
    def extend(self, batch: Batch, other: Batch) -> None:
        if batch is other or len(batch.rows) + len(other.rows) > 6:
            return
        for cache, more in zip(batch.layers, other.layers, strict=True):
            cache.extend(more)
        batch.rows += other.rows
        self.held.remove(other)
        other.layers.clear()

    @rule(batch=batches, indices=st.lists(st.integers(0, 8), max_size=4))
    def filter(self, batch: Batch, indices: list[int]) -> None:
        kept = filter_rows(batch.layers, len(batch.rows), indices)
        batch.rows = [list(batch.rows[index]) for index in kept]

    @rule(batch=consumes(batches))
    def drop(self, batch: Batch) -> None:
        self.held = [other for other in self.held if other is not batch]
        batch.layers.clear()

    @rule()
    def compact(self) -> None:
        self.pool.compact()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert_books_balance(self.pool.stats(), self.pool.budget.mapped)

    @invariant()
    def every_live_token_is_counted(self) -> None:
        if not self.pool.is_open:
            return
        group = self.pool.groups[0]
        lengths = [
            (sequence.table(group), len(row))
            for batch in self.held
            for sequence, row in zip(batch.layers[0].sequences, batch.rows, strict=True)
        ]
        assert used_rows(self.pool.stats()) == sum(live_rows(lengths, 256).values())

    @invariant()
    def every_row_holds_its_tokens(self) -> None:
        for batch in self.held:
            for layer, cache in enumerate(batch.layers):
                if batch.rows and self.pool.is_open:
                    self.assert_holds(cache, layer, batch.rows)

    def assert_holds(self, cache: PagedKVCache, layer: int, rows: list[list[int]]) -> None:
        keys, values = cache.keys_and_values()
        for index, row in enumerate(rows):
            first = keys.shape[2] - len(row)
            expected = np.array(row, dtype=np.float32)[:, None] + layer / 4
            assert (np.asarray(keys)[index, 0, first:] == expected).all()
            assert (np.asarray(values)[index, 0, first:] == expected + 0.125).all()

    def teardown(self) -> None:
        for batch in self.held:
            batch.layers.clear()
        gc.collect()
        self.pool.check()
        assert self.pool.stats().blocks_used == 0


TestCaches = CacheMachine.TestCase
TestCaches.settings = examples(30, stateful_step_count=30)
