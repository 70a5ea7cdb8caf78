"""Paged batches for models that look at the padding of mlx-vlm's batches themselves."""

from __future__ import annotations

from typing import Any, NoReturn

import mlx.core as mx

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.steps.progress import NO_PADDING, Padding

REFUSAL = (
    "this model looks for the padding of a batch among its keys, and pages hold no padding: give "
    "it prompts one at a time, or of one length, or use mlx-vlm's own caches"
)


class _PaddingColumns:
    """Stands for the number of columns of padding, which pages do not hold. Models may ask whether
    there are such; to count them raises."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotImplementedError(REFUSAL)


class LeftPaddedCache(PagedKVCache):
    """A layer of a batch that mlx-vlm pads on the left.

    Models like Qwen3.5 compute the rows of a padded step one after the other: they `extract` each
    row, give it its tokens without their padding, and `merge` the rows.
    """

    left_padding: Any = _PaddingColumns()
    # Of an extracted row: its padding in the batch, and its tokens before the step.
    _padding_before = 0
    _tokens_before = 0

    def empty(self) -> bool:
        """Whether nothing was written, and no padding is announced: models make caches of their own
        for the rows of an empty batch."""
        paddings = [each.progress(self.layer).padding for each in self.sequences]
        return super().empty() and not any(each.left for each in paddings)

    def extract(self, idx: int) -> PagedKVCache:
        """A fork of one sequence, as a cache of its own, whose next token is not padding."""
        row = super().extract(idx)
        assert isinstance(row, LeftPaddedCache)
        (fork,) = row.sequences
        row._tokens_before, _, padding = fork.progress(self.layer)
        row._padding_before = padding.left
        fork.prepare(self.layer, NO_PADDING)
        return row

    @classmethod
    def merge(cls, caches: list[PagedKVCache]) -> PagedKVCache:
        """A batch of forks of all caches' sequences; see `PagedKVCache.merge`.

        Extracted rows whose step ended within their padding keep the rest of it.
        """
        merged = super().merge(caches)
        sources = [cache for cache in caches for _ in cache.sequences]
        rows = [
            (source, sequence)
            for source, sequence in zip(sources, merged.sequences, strict=True)
            if isinstance(source, LeftPaddedCache)
        ]
        columns = max((row._columns() for row, _ in rows), default=0)
        for row, sequence in rows:
            if row._padding_before > columns:
                sequence.prepare(merged.layer, Padding(left=row._padding_before - columns))
        return merged

    def _columns(self) -> int:
        """How many columns the step of an extracted row had; 0 if the row took no tokens."""
        new_tokens = self.size() - self._tokens_before
        return self._padding_before + new_tokens if new_tokens else 0


class MaskingCache(LeftPaddedCache):
    """A layer for models that only mask columns of hidden states by the padding, as zaya1_vl does.
    Such a batch has as many columns as its longest sequence has tokens."""

    @property
    def left_padding(self) -> mx.array:
        """The padding before each sequence, [B]."""
        offsets = mx.array(self.offset).reshape(-1)
        return mx.max(offsets) - offsets


# The models, by their folders, that need the padding for hidden states alone.
_MASK_HIDDEN_STATES = frozenset({"zaya1_vl"})


def padded_batch(folder: str, rows: list[PagedKVCache], left_padding: list[int]) -> PagedKVCache:
    """One layer of a batch of new sequences, each after so many columns of padding.

    Args:
        folder: the model's folder in mlx-vlm.
        rows: the layer's cache of each sequence.
        left_padding: the columns of padding before each, of which one has none.
    """
    merged = rows[0].merge(rows)
    if not any(left_padding):
        return merged
    kind = MaskingCache if folder in _MASK_HIDDEN_STATES else LeftPaddedCache
    padded = kind(merged.pool, merged.layer, merged.sequences)
    padded.prepare(left_padding=left_padding)
    return padded
