"""The cache that a model sees while a step of it is recorded."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.steps.arrays import PagedKeys, PagedValues
from paged_kv.steps.recorded import NotRecordable, RecordedStep


class RecordedCache:
    """Takes the place of the `PagedKVCache` of one layer, and answers in arrays.

    Raises:
        NotRecordable: the model asks it for anything that it cannot know while a step is recorded.
    """

    def __init__(self, layer: int, step: RecordedStep) -> None:
        self._layer = layer
        self._step = step

    def __getattr__(self, name: str) -> Any:
        if hasattr(PagedKVCache, name):
            raise NotRecordable(f"it asks its cache for `{name}` in each step")
        raise AttributeError(f"a paged cache has no attribute {name!r}")

    @property
    def offset(self) -> mx.array:
        """The position of the next token, int32 [B], also for one sequence."""
        return self._step.offset_of(self._layer)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """See `PagedKVCache.make_mask`; no array that it returns can be computed."""
        if N != 1:
            raise NotRecordable(f"it asks for a mask of {N} tokens in a step of one")
        return self._step.mask(self._layer, return_array=return_array, window_size=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """See `PagedKVCache.update_and_fetch`."""
        return self._step.write(self._layer, keys, values)

    def keys_and_values(self) -> tuple[PagedKeys, PagedValues]:
        """See `PagedKVCache.keys_and_values`."""
        return self._step.read(self._layer)
