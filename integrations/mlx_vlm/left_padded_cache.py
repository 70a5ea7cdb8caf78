"""A paged batch for models that look at the padding of mlx-vlm's batches themselves."""

from typing import Any, NoReturn

from paged_kv.cache.paged_kv_cache import PagedKVCache

_REFUSAL = (
    "this model handles the padding of a batch itself, and pages hold no padding: give it prompts "
    "one at a time, or of one length, or use mlx-vlm's own caches"
)


class _PaddingColumns:
    """Stands for the number of columns of padding, which pages do not hold. Models may ask whether
    there are such; to count them raises."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotImplementedError(_REFUSAL)


class LeftPaddedCache(PagedKVCache):
    """A layer of a batch that mlx-vlm pads on the left."""

    left_padding = _PaddingColumns()

    @classmethod
    def merge(cls, caches: list[PagedKVCache]) -> PagedKVCache:
        """A batch of the caches' sequences.

        Raises:
            NotImplementedError: a model made caches of its own for the rows of a batch.
        """
        if not all(isinstance(cache, PagedKVCache) for cache in caches):
            raise NotImplementedError(_REFUSAL)
        return super().merge(caches)
