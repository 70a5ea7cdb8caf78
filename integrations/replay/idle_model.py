"""A model and a backend that compute nothing, so that only the bookkeeping of pages runs.

Nobody looks at the numbers, so slabs, keys and values are one number each, broadcast to their
shapes. They take no memory, and the pool counts the bytes that they would take.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache

from paged_kv.kernels.pages.backend import LayerMemory
from paged_kv.kernels.plain.plain_backend import PlainBackend
from paged_kv.trace.requests import TracedLayers


class IdleModel(Module):
    """A model of mlx-lm with the layers of a trace, those that are alike one after the other."""

    def __init__(self, layers: list[TracedLayers]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [layer for layer in layers for _ in range(layer.count)]

    def make_cache(self) -> list[Any]:
        """A prompt cache, as for any model of mlx-lm."""
        return [
            KVCache()
            if each.window is None
            else RotatingKVCache(each.window + each.sink_tokens, keep=each.sink_tokens)
            for each in self.layers
        ]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits of two tokens, float32 [B, S, 2], all 0, for inputs [B, S]."""
        batch, count = inputs.shape
        for layer, held in zip(self.layers, cache, strict=True):
            mask = create_attention_mask(inputs, held, window_size=layer.window)
            keys, values = (
                _zeros((batch, heads, count, dim), getattr(mx, layer.dtype))
                for heads, dim in ((layer.k_heads, layer.k_dim), (layer.v_heads, layer.v_dim))
            )
            queries, (keys, values) = keys, held.update_and_fetch(keys, values)
            scaled_dot_product_attention(queries, keys, values, cache=held, scale=1.0, mask=mask)
        return _zeros((batch, count, 2), mx.float32)


class IdleBackend(PlainBackend):
    """See `Backend` for the operations: none computes anything."""

    name = "idle"
    writes_in_place = True  # so that no step is computed because of a write

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        return _zeros((pages * page_units, unit_words), mx.uint16)

    def write(self, *_: Any) -> None:
        """Does nothing."""

    def load(self, *_: Any) -> None:
        """Does nothing."""

    def copy(self, *_: Any) -> None:
        """Does nothing."""

    def attend(self, pages: LayerMemory, queries: mx.array, *_: Any, **__: Any) -> mx.array:
        return _zeros((*queries.shape[:3], pages.geometry.v_dim), queries.dtype)


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.broadcast_to(mx.array(0, dtype), shape)
