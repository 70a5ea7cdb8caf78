"""Fills mlx-lm's caches and pages with the same random keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import leaves
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache

Caches = list[Any]

_CHUNK = 256


class CachePairs:
    """Makes caches of both kinds for a model.

    Attributes:
        model: a model of mlx-lm.
        factory: of the pages.
        bytes_per_token: of keys and values, in layers without a window.
    """

    def __init__(self, model: Any, factory: PagedCacheFactory) -> None:
        self.model = model
        self.factory = factory
        known = self.new()[0]
        self.step(known, 1)
        self._shapes: dict[int, tuple[mx.array, mx.array]] = {}
        self.bytes_per_token = 0
        for number, cache in enumerate(leaves(known)):
            if isinstance(cache, KVCache | RotatingKVCache | ChunkedKVCache):
                arrays: Any = cache.state
                keys, values = (each[..., :1, :] for each in arrays[:2])
                self._shapes[number] = keys, values
                self.bytes_per_token += isinstance(cache, KVCache) * (keys.nbytes + values.nbytes)

    def new(self) -> tuple[Caches, Caches]:
        """Empty caches of mlx-lm, and empty pages."""
        return stock_make_prompt_cache(self.model), self.factory.make_cache()

    def filled(self, tokens: int, rows: int = 1) -> tuple[Caches, Caches]:
        """Caches whose rows hold random keys and values of `tokens` tokens, and one token that the
        model has computed. Rows share no pages.

        Raises:
            ValueError: mlx-lm has no batches of a cache of this model.
        """
        singles = [self.new() for _ in range(rows)]
        for pair in singles:
            for caches in pair:
                self._fill(caches, tokens)
        stock, paged = map(_merged, zip(*singles, strict=True))
        for caches in (stock, paged):
            self.step(caches, rows)
        return stock, paged

    def step(self, caches: Caches, rows: int) -> None:
        """Compute one token of each row."""
        mx.eval(self.model(mx.zeros((rows, 1), dtype=mx.int32), cache=caches))

    def read(self, caches: Caches, tokens: int) -> None:
        """Compute a prompt's next tokens."""
        mx.eval(self.model(mx.ones((1, tokens), dtype=mx.int32), cache=caches)[:, -1])

    def _fill(self, caches: Caches, tokens: int) -> None:
        flat = list(leaves(caches))
        for number, shapes in self._shapes.items():
            cache = flat[number]
            for keys, values in self._random(number, shapes, tokens):
                if isinstance(cache, PagedKVCache):
                    written, _ = cache.batch.append(cache.layer, keys, values)
                    written.read.leave_unread()  # else it counts as gathered outside of a model
                else:
                    mx.eval(cache.update_and_fetch(keys, values))

    def _random(
        self, seed: int, numbers: tuple[mx.array, mx.array], tokens: int
    ) -> Iterator[tuple[mx.array, mx.array]]:
        key = mx.random.key(seed)
        for start in range(0, tokens, _CHUNK):
            count = min(_CHUNK, tokens - start)
            key, *keys = mx.random.split(key, 3)
            drawn = [
                mx.random.normal((*each.shape[:2], count, each.shape[3]), each.dtype, key=one)
                for each, one in zip(numbers, keys, strict=True)
            ]
            yield drawn[0], drawn[1]


def _merged(singles: tuple[Caches, ...]) -> Caches:
    """A batch of single caches."""
    if len(singles) == 1:
        return singles[0]
    lacking = {type(cache).__name__ for cache in singles[0] if not hasattr(cache, "merge")}
    if lacking:
        raise ValueError(f"mlx-lm has no batches of {', '.join(sorted(lacking))}")
    return [caches[0].merge(list(caches)) for caches in zip(*singles, strict=True)]
