"""Compares paged caches layer by layer with oracles that get the same input.

Logits are no measure of quantised pages. Another CPU rounds differently, a number falls into
another code, the next layer's keys change, and so on: scaling an embedding by 1 + 1e-6 moves logits
by up to 0.6. Here each layer's oracle is written with the keys and values that the paged cache got,
so one layer's rounding does not reach another. The pages' content is compared with the oracle, and
attention over pages with mlx-lm's attention over the oracle.

Oracles share only the number formats with paged_kv, which have tests of their own: no tables, rings
or kernels. Windows are masks over all tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache
from paged_kv.kernels.pages.page_format import PAGE_SIZE, FormatName, PageFormat, page_format_named
from paged_kv.steps.read import PagedRead

# Measured with every instruction set: a distance stays several times below 1 however sums are
# rounded, and exceeds 1 several times where a page has a wrong scale, token or number.
# The first is for a single token: a number rounded to the next of 16 codes is at most 0.13 of its
# token's size. The second is for the mean of all tokens, of which few are rounded otherwise.
LARGEST_APART, MEAN_APART = 0.2, 1e-3
# As a part of the largest number that attention gives, in float32.
ATTENTION_APART = 2e-5

Held = tuple[mx.array, mx.array]


# mlx-lm has a py.typed, but its caches have no types: mypy takes a subclass for Any.
_Cache: Any = KVCache


class QuantisedOracle(_Cache):  # type: ignore[misc]
    """A contiguous mlx-lm cache with the numbers that quantised pages should hold: the pages that a
    step begins and ends in have 16 bits until the next step begins, and the others are decoded
    again once they are full.

    Args:
        page_format: of full pages.
    """

    def __init__(self, page_format: PageFormat) -> None:
        super().__init__()
        self.page_format = page_format
        self.quantised: set[int] = set()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, end = self.offset, self.offset + keys.shape[2]
        self._quantise(range(start // PAGE_SIZE))
        super().update_and_fetch(keys, values)
        self._quantise(range(-(-start // PAGE_SIZE), (end - 1) // PAGE_SIZE))
        held: tuple[mx.array, mx.array] = self.keys_and_values()
        return held

    def _quantise(self, pages: range) -> None:
        """Turn the tokens of full pages into the format that these get."""
        for page in set(pages) - self.quantised:
            part = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            full = self.page_format if page else self.page_format.first
            for array, each in ((self.keys, full.keys), (self.values, full.values)):
                rows = array[:, :, part]
                array[:, :, part] = each.decode(each.encode(rows), rows.dtype)
            self.quantised.add(page)


@dataclass(frozen=True)
class _Step:
    """A step's keys and values, and all that the oracle holds after it."""

    given: Held
    held: Held

    @property
    def count(self) -> int:
        return self.given[0].shape[2]


class FollowedCache:
    """One layer of a sequence, in pages and in an oracle.

    Args:
        paged: what the model reads.
        page_format: of full pages; those of rings are written over, and keep 16 bits.
        window: how many tokens a query sees; None for all.
        distances: takes those of each step. At most 1 is allowed.
    """

    def __init__(
        self,
        paged: PagedKVCache,
        page_format: FormatName,
        window: int | None,
        distances: list[mx.array],
    ) -> None:
        self.paged = paged
        self.oracle = QuantisedOracle(page_format_named("fp16" if window else page_format))
        self.window = window
        self.distances = distances

    @property
    def offset(self) -> Any:
        return self.paged.offset

    @property
    def state(self) -> Any:
        """The arrays that a generator evaluates between steps, and distances that no output depends
        on, such as those of a prompt's last layer."""
        return self.paged.state, self.distances

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        return self.paged.make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        paged = self.paged.update_and_fetch(keys, values)
        step = _Step((keys, values), self.oracle.update_and_fetch(keys, values))
        read: Any = _ComparedRead(paged[0].read, self, step)
        paged[0].read = paged[1].read = read
        return paged


class _ComparedRead:
    """Takes the place of the read that the attention hook finds on a layer's keys and values."""

    def __init__(self, read: PagedRead, followed: FollowedCache, step: _Step) -> None:
        self.read = read
        self.window, self.distances = followed.window, followed.distances
        self.step = step

    def attend(self, queries: mx.array, mask: Any, **options: Any) -> mx.array | None:
        found = self.read.attend(queries, mask, **options)
        if found is None:
            return None
        distances = list(self._distances(found, queries, options))
        self.distances += distances
        # Evaluate now: a distance must not read pages after a later write.
        looked_at: mx.array = mx.depends(found, distances)
        return looked_at

    def _distances(
        self, found: mx.array, queries: mx.array, options: dict[str, Any]
    ) -> Iterator[mx.array]:
        """Compare the pages with the oracle, and attention over pages with attention over the
        oracle."""
        step = self.step
        visible = step.held[0].shape[2]
        if self.window is not None:
            visible -= max(0, visible - step.count - self.window + 1)
        metadata = self.read.group_step.metadata
        gathered = self.read.pages.gather(metadata, self.read.unwritten)
        paged = [each[:, :, -visible:] for each in gathered]
        for ours, oracles in zip(paged, step.held, strict=True):
            yield _vectors_apart(ours, oracles[:, :, -visible:])
        recoded = paged
        if self.read.group_step.parts:
            gathered = self.read.pages.gather(self.read.group_step.parts[-1].metadata, None)
            recoded = [each[:, :, -visible:] for each in gathered]
        for first, count, seen in _seen_by_page(step, paged, recoded):
            part = slice(None), slice(None), slice(first, first + count)
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
    for page in range(before // PAGE_SIZE, -(-end // PAGE_SIZE)):
        base, last = page * PAGE_SIZE, min(end, (page + 1) * PAGE_SIZE)
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
    model: Module, factory: PagedCacheFactory, page_format: FormatName, distances: list[mx.array]
) -> list[FollowedCache]:
    """A new cache of the factory; each layer has an oracle in that page format."""
    pairs = zip(factory.make_cache(), make_prompt_cache(model), strict=True)
    return [
        FollowedCache(paged, page_format, getattr(stock, "max_size", None), distances)
        for paged, stock in pairs
    ]


def farthest(distances: list[mx.array]) -> float:
    """The largest distance. Fails if there is none, or if it is above 1."""
    assert distances, "no attention read pages"
    return float(mx.stack(distances).max())
