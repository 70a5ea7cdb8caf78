"""Prompt caches with quantised keys and values: pages, and mlx-lm's.

mlx-lm's quantised attention takes twice as long on a CPU as the rest of a step, and it has none for
sliding windows. So the bench rounds its numbers as its QuantizedKVCache would, with its own
`mx.quantize`, and holds them in its caches of full precision: the same numbers, up to the order of
sums. `quantised_quality` checks that on a piece of text.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

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
    """A cache of mlx-lm, with rows rounded before it takes them."""
    take = cache.update_and_fetch
    cache.update_and_fetch = lambda keys, values: take(_round(keys, bits), _round(values, bits))
    return cache


def _round(numbers: mx.array, bits: int) -> mx.array:
    codes, scales, biases = mx.quantize(numbers, group_size=MLX_GROUP, bits=bits)
    return mx.dequantize(codes, scales, biases, group_size=MLX_GROUP, bits=bits)


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
