"""A paged batch for models that look at the padding of mlx-vlm's batches themselves."""

from typing import Any, NoReturn

from paged_kv.cache.paged_kv_cache import PagedKVCache


class _PaddingColumns:
    """Stands for the number of columns of padding, which pages do not hold. Models may ask whether
    there are such; to count them raises."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotImplementedError(
            "this model masks the columns of padding in a batch itself, and pages hold no padding: "
            "give it prompts one at a time, or of one length, or use mlx-vlm's own caches"
        )


class LeftPaddedCache(PagedKVCache):
    """A layer of a batch that mlx-vlm pads on the left."""

    left_padding = _PaddingColumns()
