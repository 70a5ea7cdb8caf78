"""Prompt caches that hold keys and values with fewer bits: pages, and mlx-lm's.

mlx-lm's quantised attention takes twice as long on a CPU as all the rest of a step, and it has none
for sliding windows. So its numbers are rounded as its QuantizedKVCache would, by its own
`mx.quantize`, and held in its caches of full precision: the same numbers, up to the order of sums.
`quantised_quality` checks that on a piece of text.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from paged_kv import PagedCacheFactory

MLX_GROUP = 64

Caches = list[Any]
Maker = Callable[[Any], Caches]


def paged(page_format: Any, max_bytes: int | None = None) -> Maker:
    def make(model: Any) -> Caches:
        return PagedCacheFactory(model, page_format=page_format, max_bytes=max_bytes).make_cache()

    return make


def rounded(bits: int) -> Maker:
    """mlx-lm's caches of a model, with numbers as its QuantizedKVCache has them."""

    def make(model: Any) -> Caches:
        return [_rounded(cache, bits) for cache in make_prompt_cache(model)]

    return make


def _rounded(cache: Any, bits: int) -> Any:
    if isinstance(cache, RotatingKVCache):
        return _RoundedRotating(cache, bits)
    assert type(cache) is KVCache, cache
    return _Rounded(bits)


def _round(numbers: mx.array, bits: int) -> mx.array:
    options = {"group_size": MLX_GROUP, "bits": bits}
    return mx.dequantize(*mx.quantize(numbers, **options), **options)


class _Rounded(KVCache):
    def __init__(self, bits: int) -> None:
        super().__init__()
        self._code_bits = bits  # mlx-lm takes a cache with a member `bits` for a quantised one

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(
            _round(keys, self._code_bits), _round(values, self._code_bits)
        )


class _RoundedRotating(RotatingKVCache):
    def __init__(self, of: RotatingKVCache, bits: int) -> None:
        super().__init__(max_size=of.max_size, keep=of.keep)
        self._code_bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(
            _round(keys, self._code_bits), _round(values, self._code_bits)
        )


KINDS: dict[str, Maker] = {
    "fp16": paged("fp16"),
    "q8": paged("q8"),
    "q8/q4": paged(("q8", "q4")),
    "q4": paged("q4"),
    "q4-unrotated": paged("q4-unrotated"),
    "mlx-lm 8 bits": rounded(8),
    "mlx-lm 4 bits": rounded(4),
}
"""All that are compared, by name; "fp16" is what the others are compared with."""
