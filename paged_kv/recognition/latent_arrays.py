"""Defines the arrays by which latent attention (MLA) is recognised.

Models with latent attention cache one latent and one position key per token, for all heads
together. A query of one token attends to them like this:

    latents, position_keys = cache.update_and_fetch(...)
    scores = (position_queries * scale) @ position_keys.swapaxes(-1, -2)
    scores = mx.where(mask, scores, lowest)  # in a batch
    output = scaled_dot_product_attention(queries, latents, latents, mask=scores)

Some models attend only to the tokens that an indexer chooses:

    chosen = mx.argpartition(...)[..., -k:]
    indices = mx.broadcast_to(chosen[:, :, 0, :, None], (B, 1, k, dim))
    latents = mx.take_along_axis(latents, indices, axis=2)

The arrays of this file are the results of these operations. Each holds the same numbers as MLX's
own result, as a lazy graph, so that models may do anything else with them. They also remember the
operands, so that the pages can be read instead, and the graph is never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import mlx.core as mx

IN_PLACE = (
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    "__setitem__",
)
"""The methods by which an array changes into another one and stays the same object."""


class Read(Protocol):
    """A read of pages: see `PagedRead`."""

    def gather(self) -> tuple[mx.array, mx.array]: ...

    @property
    def attend(self) -> Callable[..., mx.array | None]: ...


class FollowedArray(mx.array):
    """An array that remembers what it was made of.

    Attributes:
        is_changed: whether the array was changed in place, and holds other numbers now.
    """

    is_changed = False


def _forgetting(name: str) -> Callable[..., Any]:
    """The method of mx.array, for an array that then is no longer what it was made of."""
    stock = getattr(mx.array, name)

    def change(self: FollowedArray, *arguments: Any) -> Any:
        self.is_changed = True
        return stock(self, *arguments)

    return change


for _name in IN_PLACE:
    setattr(FollowedArray, _name, _forgetting(_name))


class ReadArray(FollowedArray):
    """An array that stands for numbers of a read of pages.

    Attributes:
        read: the read.
        holds_values: whether these are the values of the pages, perhaps with another axis.
        is_as_held: whether it has the dtype and the heads of the pages.
    """

    read: Read
    holds_values = False
    is_as_held = True

    @classmethod
    def of(cls, array: mx.array, read: Read, **about: Any) -> Self:
        """`array` as one that stands for numbers of a read, with other attributes."""
        result = cls(array)
        vars(result).update(about, read=read)
        return result


class PositionKeys(ReadArray):
    """The position keys of a read with their last axes swapped, [B, 1, P, T]."""

    def __rmatmul__(self, queries: mx.array) -> mx.array:
        scores = mx.matmul(queries, mx.array(self))
        if self.is_changed or self.shape[1] != 1 or queries.ndim != 4:
            return scores
        # A copy that shares the memory: what the model does to `queries` in place stays outside.
        return PositionScores.of(scores, self.read, queries=mx.array(queries))


class PositionScores(ReadArray):
    """The scores of position queries and position keys, [B, q_heads, S, T].

    Attributes:
        queries: the position queries times the scale, [B, q_heads, S, P].
        mask: what hides scores; None before any were hidden.
        lowest: what hidden scores are.
    """

    queries: mx.array
    mask: mx.array | None = None
    lowest: Any = None

    def masked(self, result: mx.array, mask: Any, lowest: Any) -> mx.array:
        """`result`, which is mx.where(mask, self, lowest), as scores if it still stands for them:
        if `lowest` is so low that a softmax gives hidden scores no weight."""
        if self.is_changed or self.mask is not None or not hides(mask, lowest, self.dtype):
            return result
        about = {"queries": self.queries, "mask": mask, "lowest": lowest}
        return PositionScores.of(result, self.read, **about)

    def of_gathered(self, position_keys: mx.array) -> mx.array:
        """The same scores, computed with position keys [B, 1, T, P] that were gathered."""
        scores = mx.matmul(self.queries, position_keys.swapaxes(-1, -2))
        return scores if self.mask is None else mx.where(self.mask, scores, self.lowest)


class TokenIndices(FollowedArray):
    """Indices of tokens, [B, heads, K, dim], that are equal for all numbers of a token and head.

    Attributes:
        tokens: those of the first head, [B, K].
    """

    tokens: mx.array

    @classmethod
    def among(cls, result: mx.array, array: object) -> mx.array:
        """`result`, which is mx.broadcast_to(array, shape), as `TokenIndices` if it can be that.

        They are uint32, as the indices that MLX finds are, so none is negative.
        """
        if not isinstance(array, mx.array) or array.dtype != mx.uint32 or array.ndim != 4:
            return result
        if array.shape != (*result.shape[:3], 1):
            return result
        indices = cls(result)
        indices.tokens = array[:, 0, :, 0]
        return indices


def hides(mask: Any, lowest: Any, dtype: mx.Dtype) -> bool:
    """Whether a softmax gives no weight to scores that mx.where(mask, scores, lowest) replaces."""
    return isinstance(mask, mx.array) and bool(_number(lowest) <= mx.finfo(dtype).min)


def _number(value: Any) -> float:
    """A number, or the number in an array of one; 0 for other arrays."""
    if isinstance(value, mx.array):
        value = value.item() if value.size == 1 else 0
    return float(value)
