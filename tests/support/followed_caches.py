"""Compares paged caches layer by layer with oracles that get the same input.

Logits are no measure of quantised pages. Another CPU rounds differently, a number falls into
another code, the next layer's keys change, and so on: scaling an embedding by 1 + 1e-6 moves logits
by up to 0.6. Here each layer's oracle is written with the keys and values that the paged cache got,
so one layer's rounding does not reach another. The pages' content is compared with the oracle, and
attention over pages with mlx-lm's attention over the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache
from paged_kv.kernels.pages.page_format import FormatName
from paged_kv.steps.read import PagedRead
from tests.support.quantised_oracle import PAGE, QuantisedOracle, oracle_caches

# Measured with every instruction set: a distance stays several times below 1 however sums are
# rounded, and exceeds 1 several times where a page has a wrong scale, token or number.
# The first is for a single token: a number rounded to the next of 16 codes is at most 0.13 of its
# token's size. The second is for the mean of all tokens, of which few are rounded otherwise.
LARGEST_APART, MEAN_APART = 0.2, 1e-3
# As a part of the largest number that attention gives, in float32.
ATTENTION_APART = 2e-5

Held = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class _Step:
    """The valid tokens of one sequence's step, from `start` to `stop`, their keys and values, and
    all that its oracle holds after it."""

    start: int
    stop: int
    given: Held
    held: Held

    @property
    def count(self) -> int:
        return self.stop - self.start


class FollowedCache:
    """One layer of some sequences, in pages and in an oracle for each.

    Args:
        paged: what the model reads.
        oracles: one for each of its sequences.
        window: how many tokens a query sees; None for all.
        distances: takes those of each step and sequence. At most 1 is allowed. Copies share it.
    """

    def __init__(
        self,
        paged: PagedKVCache,
        oracles: list[QuantisedOracle],
        window: int | None,
        distances: list[mx.array],
    ) -> None:
        self.paged = paged
        self.oracles = oracles
        self.window = window
        self.distances = distances
        self.left = [0] * len(oracles)
        self.lengths: list[int] | None = None

    @property
    def offset(self) -> Any:
        return self.paged.offset

    @property
    def state(self) -> Any:
        """The arrays that a generator evaluates between steps, and distances that no output depends
        on, such as those of a prompt's last layer."""
        return self.paged.state, self.distances

    @property
    def nbytes(self) -> int:
        return self.paged.nbytes

    def size(self) -> int:
        return self.paged.size()

    def empty(self) -> bool:
        return self.paged.empty()

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        return self.paged.make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        paged = self.paged.update_and_fetch(keys, values)
        steps = []
        for row, (start, stop) in enumerate(self._next_tokens(keys.shape[2])):
            valid = slice(row, row + 1), slice(None), slice(start, stop)
            given = keys[valid], values[valid]
            steps.append(_Step(start, stop, given, self.write(row, *given)))
        read: Any = _ComparedRead(paged[0].read, self, steps)
        paged[0].read = paged[1].read = read
        return paged

    def write(self, row: int, keys: mx.array, values: mx.array) -> Held:
        """Append the valid tokens of a sequence's step to its oracle; returns all keys and values
        that the oracle holds."""
        held: Held = self.oracles[row].update_and_fetch(keys, values)
        return held

    def _next_tokens(self, count: int) -> Iterator[tuple[int, int]]:
        """For each sequence, which of the next `count` tokens are valid."""
        for row in range(len(self.oracles)):
            start = min(self.left[row], count)
            self.left[row] -= start
            stop = count if self.lengths is None else min(count, start + self.lengths[row])
            if self.lengths is not None:
                self.lengths[row] -= stop - start
            yield start, stop

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        assert right_padding is None or lengths is not None
        self.paged.prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)
        self.left = list(left_padding or self.left)
        self.lengths = list(lengths) if lengths is not None and any(right_padding or []) else None

    def finalize(self) -> None:
        self.paged.finalize()
        self.left, self.lengths = [0] * len(self.oracles), None

    def is_trimmable(self) -> bool:
        return self.paged.is_trimmable()

    def trim(self, n: int) -> int:
        trimmed = [oracle.trim(n) for oracle in self.oracles]
        assert self.paged.trim(n) == max(trimmed)
        return max(trimmed)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> FollowedCache:
        assert self.paged.to_quantized(group_size, bits) is self.paged
        for oracle in self.oracles:
            oracle.to_quantized(group_size, bits)
        return self

    @classmethod
    def merge(cls, caches: list[FollowedCache]) -> FollowedCache:
        return caches[0]._with(
            PagedKVCache.merge([cache.paged for cache in caches]),
            [oracle for cache in caches for oracle in cache.oracles],
        )

    def extend(self, other: FollowedCache) -> None:
        self.paged.extend(other.paged)
        self.oracles += other.oracles
        self.left += other.left

    def filter(self, batch_indices: list[int] | mx.array) -> None:
        listed: Any = (
            batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        )
        self.paged.filter(listed)
        self.oracles = [copy.deepcopy(self.oracles[index]) for index in listed]
        self.left = [self.left[index] for index in listed]

    def extract(self, idx: int) -> FollowedCache:
        return self._with(self.paged.extract(idx), [self.oracles[idx]])

    def __deepcopy__(self, memo: dict[int, Any]) -> FollowedCache:
        return self._with(copy.deepcopy(self.paged, memo), self.oracles)

    def _with(self, paged: PagedKVCache, oracles: list[QuantisedOracle]) -> FollowedCache:
        return type(self)(paged, copy.deepcopy(oracles), self.window, self.distances)


class _ComparedRead:
    """Takes the place of the read that the attention hook finds on a layer's keys and values."""

    def __init__(self, read: PagedRead, followed: FollowedCache, steps: list[_Step]) -> None:
        self.read = read
        self.window, self.distances = followed.window, followed.distances
        self.steps = steps

    def attend(self, queries: mx.array, mask: Any, **options: Any) -> mx.array | None:
        found = self.read.attend(queries, mask, **options)
        if found is None:
            return None
        distances = [
            distance
            for row, step in enumerate(self.steps)
            if step.count
            for distance in self._distances(row, step, found, queries, options)
        ]
        self.distances += distances
        # Evaluate now: a distance must not read pages after a later write.
        looked_at: mx.array = mx.depends(found, distances)
        return looked_at

    def _distances(
        self, row: int, step: _Step, found: mx.array, queries: mx.array, options: Any
    ) -> Iterator[mx.array]:
        """Compare the pages of a sequence with its oracle, and attention over pages with attention
        over the oracle."""
        before = step.held[0].shape[2] - step.count
        visible = step.held[0].shape[2]
        if self.window is not None:
            visible -= max(0, before - self.window + 1)
        metadata, new_tokens = self.read.group_step.metadata, self.read.unwritten
        # Sequences end together, except for the padding after them.
        end = max(metadata.ends) - (queries.shape[2] - step.stop)
        tokens = slice(row, row + 1), slice(None), slice(end - visible, end)
        gathered = self.read.pages.gather(metadata, new_tokens)
        paged = [each[tokens] for each in gathered]
        for ours, oracles in zip(paged, step.held, strict=True):
            yield _vectors_apart(ours, oracles[:, :, -visible:])
        recoded = paged
        if self.read.group_step.parts:
            gathered = self.read.pages.gather(self.read.group_step.parts[-1].metadata, None)
            recoded = [each[tokens] for each in gathered]
        for first, count, seen in _seen_by_page(step, paged, recoded):
            at = step.start + first
            part = slice(row, row + 1), slice(None), slice(at, at + count)
            mask = create_causal_mask(count, seen[0].shape[2] - count, self.window)
            yield _attention_apart(
                found[part],
                mx.fast.scaled_dot_product_attention(queries[part], *seen, mask=mask, **options),
            )


def _seen_by_page(
    step: _Step, paged: list[mx.array], recoded: list[mx.array]
) -> Iterator[tuple[int, int, list[mx.array]]]:
    """What the tokens of a step see: their own page in 16 bits, as `paged` has the first page and
    the last, and earlier pages as `recoded` has them. For the tokens of each page: the first, their
    number, and all keys and values up to them."""
    end = paged[0].shape[2]
    before = end - step.count
    if recoded is paged:
        yield 0, step.count, paged
        return
    for page in range(before // PAGE, -(-end // PAGE)):
        base, last = page * PAGE, min(end, (page + 1) * PAGE)
        first = max(before, base)
        seen = [
            mx.concatenate(
                [
                    earlier[:, :, :base],
                    array[:, :, base:first],
                    given[:, :, first - before : last - before],
                ],
                axis=2,
            )
            for earlier, array, given in zip(recoded, paged, step.given, strict=True)
        ]
        yield first - before, last - first, seen


def _vectors_apart(ours: mx.array, oracles: mx.array) -> mx.array:
    """How far keys, or values, are from the oracle's, as a part of the allowed distance."""
    ours, oracles = ours.astype(mx.float32), oracles.astype(mx.float32)
    apart = mx.linalg.norm(ours - oracles, axis=-1) / mx.linalg.norm(oracles, axis=-1)
    return mx.maximum(apart.max() / LARGEST_APART, apart.mean() / MEAN_APART)


def _attention_apart(found: mx.array, expected: mx.array) -> mx.array:
    """How far an attention output is from another one, as a part of the allowed distance."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return mx.abs(found - expected).max() / mx.abs(expected).max() / ATTENTION_APART


def followed_caches(
    model: Module,
    factory: PagedCacheFactory,
    page_format: FormatName,
    distances: list[mx.array],
    kind: type[FollowedCache] = FollowedCache,
) -> list[FollowedCache]:
    """A new cache of the factory; each layer has an oracle in that page format."""
    windows = [getattr(stock, "max_size", None) for stock in make_prompt_cache(model)]
    oracles = oracle_caches(model, page_format)
    return [
        kind(paged, [oracle], window, distances)
        for paged, oracle, window in zip(factory.make_cache(), oracles, windows, strict=True)
    ]


def farthest(distances: list[mx.array]) -> float:
    """The largest distance. Fails if there is none, or if it is above 1."""
    assert distances, "no attention read pages"
    return float(mx.stack(distances).max())
