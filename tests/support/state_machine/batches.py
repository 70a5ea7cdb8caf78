"""Batches of caches with the expected content of their sequences, and steps whose outputs are
compared."""

import contextlib
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted
from paged_kv.integrations.batching.prompt_caches import paged_caches
from tests.support.state_machine.expected import Check, Oracle
from tests.support.state_machine.rows import Formats, Row

TOKENS = 97
# Prompts are beginnings of these texts, which share a prefix.
_FIRST = [(7 * i * i + 3 * i + 1) % TOKENS for i in range(2200)]
TEXTS = [
    _FIRST,
    _FIRST[:300] + [(5 * i * i + 11) % TOKENS for i in range(1900)],
    _FIRST[:512] + [(3 * i * i + 2 * i) % TOKENS for i in range(1700)],
]


@dataclass(eq=False)
class Home:
    """A factory, None for a pool that a saved cache was loaded into, and its settings."""

    pool: PagePool
    formats: Formats
    factory: PagedCacheFactory | None = None
    is_open: bool = True


@dataclass(eq=False)
class Batch:
    """A prompt cache, and the expected content of each of its sequences."""

    layers: list[Any]
    rows: list[Row]
    home: Home

    @property
    def paged(self) -> list[PagedKVCache]:
        return paged_caches(self.layers)

    @property
    def arrays(self) -> list[Any]:
        """The arrays of layers without pages, not copied."""
        inner = [each for cache in self.layers for each in getattr(cache, "caches", [cache])]
        return [
            array for each in inner if not isinstance(each, PagedKVCache) for array in each.cache
        ]

    @property
    def longest(self) -> int:
        return max((len(row.tokens) for row in self.rows), default=0)

    def fork(self) -> "Batch":
        return Batch(copy.deepcopy(self.layers), [row.copy() for row in self.rows], self.home)

    def extract(self, index: int) -> "Batch":
        layers = [cache.extract(index) for cache in self.layers]
        return Batch(layers, [self.rows[index].copy()], self.home)

    def lengths(self) -> list[list[int]]:
        """For each sequence, the length of each layer and the number of blocks."""
        sequences = self.paged[0].sequences
        groups = [group for group in self.home.pool.groups if group.is_open]
        return [
            [*each.context_lens, *(len(each.blocks(group)) for group in groups)]
            for each in sequences
        ]


class Steps:
    """Runs steps of a model, and compares their outputs with an oracle's."""

    def __init__(self, model: Any, oracle: Oracle) -> None:
        self.model = model
        self.oracle = oracle
        self._late: list[tuple[mx.array, Check]] = []

    def take(
        self, batch: Batch, steps: list[list[int]], *, is_left: bool = False, late: bool = False
    ) -> bool:
        """Feed tokens to every sequence, shorter ones padded; returns False, with nothing changed,
        if the pool is exhausted. Outputs are compared at once, or, with `late`, when they are
        computed."""
        before, arrays = batch.lengths(), batch.arrays
        lengths = [len(step) for step in steps]
        try:
            with _padded(batch, lengths, is_left=is_left):
                padded = [_padded_step(step, max(lengths), is_left=is_left) for step in steps]
                outputs = self.model(mx.array(padded), cache=batch.layers)
        except PoolExhausted:
            after = batch.lengths()
            assert after == before, f"a step that failed left {after} of {before}"
            assert all(a is b for a, b in zip(batch.arrays, arrays, strict=True)), "and states"
            return False
        for index, (row, step) in enumerate(zip(batch.rows, steps, strict=True)):
            row.add(step)
            if step:
                own = outputs[index, -len(step) :] if is_left else outputs[index, : len(step)]
                self._expect(batch, index, len(step), own)
        if not late:
            self.settle()
        return True

    def generate(self, batch: Batch, count: int) -> bool:
        """Feed every sequence its next token without waiting for it. Returns False, with shorter
        sequences, if the pool was exhausted."""
        tokens = mx.array([[row.tokens[-1]] for row in batch.rows])
        said: list[tuple[mx.array, mx.array]] = []
        try:
            for _ in range(count):
                outputs = self.model(tokens, cache=batch.layers)
                said.append((tokens, outputs))
                tokens = mx.argmax(outputs[:, :, :TOKENS], axis=-1)
        except PoolExhausted:
            pass
        for index, row in enumerate(batch.rows):
            row.add([np.array(fed)[index, 0].item() for fed, _ in said])
            if said:
                # Once a page is recoded, nothing tells what the tokens before its end saw.
                in_last_page = (len(row.tokens) - 1) % 256 + 1
                known = len(said) if row.full == "fp16" else min(len(said), in_last_page)
                own = mx.concatenate([outputs[index] for _, outputs in said[-known:]])
                self._expect(batch, index, known, own)
        self.settle()
        return len(said) == count

    def settle(self) -> None:
        """Compare the outputs that were not computed yet."""
        late, self._late = self._late, []
        wrong = [each for outputs, check in late for each in check(np.array(outputs))]
        assert not wrong, wrong

    def look(self, batch: Batch) -> None:
        """Compare the pages of a batch, and the outputs of one more step."""
        self.settle()
        for index, row in enumerate(batch.rows):
            if row.tokens:
                wrong = self.oracle.wrong_content(row, views(batch, index))
                assert not wrong, f"row {index} of {len(batch.rows)}: {wrong}"
        if batch.rows:
            self.take(batch.fork(), [[1]] * len(batch.rows))

    def _expect(self, batch: Batch, index: int, count: int, outputs: mx.array) -> None:
        check = self.oracle.expect(batch.rows[index], views(batch, index), count)
        self._late.append((outputs, check))


def views(batch: Batch, index: int) -> list[PagedKVCache]:
    """Caches that view one sequence of a batch, without a fork."""
    return [PagedKVCache(each.pool, each.layer, [each.sequences[index]]) for each in batch.paged]


def merged(batches: list[Batch]) -> Batch:
    """A batch of forks of all sequences, merged as mlx-lm does; its own caches merge single
    sequences only."""
    if batches[0].arrays:
        batches = [each.extract(row) for each in batches for row in range(len(each.rows))]
    layers = [
        type(caches[0]).merge(list(caches))
        for caches in zip(*[each.layers for each in batches], strict=True)
    ]
    return Batch(layers, [row.copy() for each in batches for row in each.rows], batches[0].home)


def continued(tokens: list[int], count: int, turn: int = 0) -> list[int]:
    """The next tokens of the text that a sequence follows, or of another text; `turn` makes forks
    differ."""
    length = len(tokens)
    texts = [text for text in TEXTS if text[:length] == tokens] if not turn else []
    text = (texts or TEXTS)[(length + turn) % len(texts or TEXTS)]
    return text[length : length + count]


def save_and_load(batch: Batch, path: Path, homes: list[Home]) -> Batch | None:
    """A batch loaded from a file; None if the pool has no room for it."""
    save_prompt_cache(str(path), batch.layers)
    try:
        layers = load_prompt_cache(str(path))
    except PoolExhausted:
        gc.collect()
        return None
    pool = paged_caches(layers)[0].pool
    known = next((home for home in homes if home.pool is pool), None)
    home = known or Home(pool, batch.home.formats, is_open=False)
    if known is None:
        homes.append(home)
    return Batch(layers, [row.copy() for row in batch.rows], home)


@contextlib.contextmanager
def _padded(batch: Batch, lengths: list[int], *, is_left: bool) -> Iterator[None]:
    """Announce the padding of a step, as mlx-lm does."""
    padding = [max(lengths) - length for length in lengths]
    if not any(padding):
        yield
        return
    for cache in batch.layers:
        if is_left:
            cache.prepare(left_padding=padding)
        else:
            cache.prepare(lengths=lengths, right_padding=padding)
    try:
        yield
    finally:
        for cache in batch.layers:
            cache.finalize()


def _padded_step(step: list[int], length: int, *, is_left: bool) -> list[int]:
    padding = [0] * (length - len(step))
    return padding + step if is_left else step + padding
