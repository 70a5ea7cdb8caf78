"""Defines the arrays by which attention is recognised that models write out themselves.

Models with latent attention (MLA) cache one latent and one position key per token, for all heads
together. A query of one token attends to them like this:

    latents, position_keys = cache.update_and_fetch(...)
    scores = (position_queries * scale) @ position_keys.swapaxes(-1, -2)
    scores = mx.where(mask, scores, lowest)  # in a batch
    output = scaled_dot_product_attention(queries, latents, latents, mask=scores)

Some models attend only to the tokens that an indexer chooses:

    chosen = mx.argpartition(...)[..., -k:]
    indices = mx.broadcast_to(chosen[:, :, 0, :, None], (B, 1, k, dim))
    latents = mx.take_along_axis(latents, indices, axis=2)

mlx-lm's attention has no softcap, so models with one write:

    keys, values = cache.update_and_fetch(...)
    keys, values = mx.expand_dims(keys, 2), mx.expand_dims(values, 2)  # with grouped queries
    scores = queries @ keys.swapaxes(-1, -2)
    scores = mx.tanh(scores / softcap)
    scores *= softcap
    scores = mx.where(mask, scores, lowest)  # if there is a mask
    output = mx.softmax(scores, axis=-1) @ values

The arrays of this file are the results of these operations. Each holds the same numbers as MLX's
own result, as a lazy graph, so that models may do anything else with them. They also remember the
operands, so that the pages can be read instead, and the graph is never computed. Where only
attention uses keys and values, the model gets placeholders, which cannot be computed at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Protocol, Self

import mlx.core as mx

# MLX's own, where attention replaces `mx.broadcast_to`: nothing looks for these arrays there.
_broadcast_to = mx.broadcast_to


def new_placeholder(dtype: mx.Dtype) -> mx.array:
    """A new scalar that cannot be computed: the argument of a traced function."""
    found: list[mx.array] = []

    def note(number: mx.array) -> mx.array:
        found.append(number)
        return number + 1

    mx.export_function(lambda _: None, note, mx.zeros((), dtype))
    return found[0]


_known_placeholder = cache(new_placeholder)


def placeholder(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array that cannot be computed: MLX raises a RuntimeError that it has no primitive."""
    return _broadcast_to(_known_placeholder(dtype), shape)


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
    """An array that remembers what it was made of, until it is changed in place."""

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
    `tokens` are those of the first head, [B, K]."""

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


Made = Literal["product", "quotient", "tanh", "capped", "masked", "weights"]
"""The latest operation on scores."""


class GroupedArray(ReadArray):
    """Keys or values of a read with an axis for grouped queries, [B, kv_heads, 1, T, dim]."""

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        swapped: mx.array = super().swapaxes(axis1, axis2, **options)
        is_last_two = {axis1 % 5, axis2 % 5} == {3, 4}
        if self.is_changed or self.holds_values or not is_last_two:
            return swapped
        return TransposedKeys.of(swapped, self.read)


class TransposedKeys(ReadArray):
    """The keys of a read with their last axes swapped, [B, k_heads, k_dim, T] or grouped."""

    def __rmatmul__(self, queries: mx.array) -> mx.array:
        scores = mx.matmul(queries, mx.array(self))
        if self.is_changed or queries.ndim != self.ndim:
            return scores
        # A copy that shares the memory: what the model does to `queries` in place stays outside.
        return AttentionScores.of(scores, self.read, queries=mx.array(queries))


class AttentionScores(ReadArray):
    """Scores of queries and keys, [B, heads, S, T] or grouped, or what was made of them.

    Attributes:
        queries: the queries times the scale, [B, heads, S, k_dim] or grouped.
        made: the latest operation.
        softcap: what the scores were divided by.
        mask: what hides scores; None before any were hidden.
        lowest: what hidden scores are.
    """

    queries: mx.array
    made: Made = "product"
    softcap: float
    mask: mx.array | None = None
    lowest: Any = None

    def __truediv__(self, divisor: Any) -> mx.array:
        quotient: mx.array = super().__truediv__(divisor)
        if self._is("product") and isinstance(divisor, int | float) and divisor > 0:
            return self._followed_by(quotient, "quotient", softcap=divisor)
        return quotient

    def tanh(self, result: mx.array) -> mx.array:
        """`result`, which is mx.tanh(self), as scores if these were divided by a softcap."""
        return self._followed_by(result, "tanh") if self._is("quotient") else result

    def __mul__(self, factor: Any) -> mx.array:
        product: mx.array = super().__mul__(factor)
        return self._followed_by(product, "capped") if self._is_capped_by(factor) else product

    __rmul__ = __mul__

    def __imul__(self, factor: Any) -> mx.array:
        is_capped = self._is_capped_by(factor)
        super().__imul__(factor)
        if is_capped:
            self.made, self.is_changed = "capped", False
        return self

    def masked(self, mask: Any, lowest: Any) -> mx.array:
        """mx.where(mask, self, lowest), where a mask [B, 1, S, T] is of all groups of heads."""
        result = mx.where(self._by_group(mask), mx.array(self), lowest)
        if self._is("capped") and hides(mask, lowest, self.dtype):
            return self._followed_by(result, "masked", mask=mask, lowest=lowest)
        return result

    def softmax(self, result: mx.array, axis: Any) -> mx.array:
        """`result`, which is mx.softmax(self, axis), as weights if it is over all tokens."""
        is_over_tokens = axis in (-1, self.ndim - 1)
        if is_over_tokens and (self._is("capped") or self._is("masked")):
            return self._followed_by(result, "weights")
        return result

    def __matmul__(self, values: Any) -> mx.array:
        if not self._is("weights") or not self._are_weights_of(values):
            return super().__matmul__(values)
        queries = self.queries if self.ndim == 4 else mx.flatten(self.queries, 1, 2)
        output = self.read.attend(queries, self.mask, scale=1.0, softcap=self.softcap)
        if output is None:
            return self._over_gathered()
        return output if self.ndim == 4 else mx.unflatten(output, 1, self.shape[1:3])

    def _over_gathered(self) -> mx.array:
        keys, values = self.read.gather()
        if self.ndim == 5:
            keys, values = mx.expand_dims(keys, 2), mx.expand_dims(values, 2)
        scores = self.softcap * mx.tanh(self.queries @ keys.swapaxes(-1, -2) / self.softcap)
        if self.mask is not None:
            scores = mx.where(self._by_group(self.mask), scores, self.lowest)
        return mx.softmax(scores, axis=-1, precise=True) @ values

    def _by_group(self, mask: Any) -> Any:
        """A mask [B, 1, S, T] with the axis of grouped queries; other masks as they are."""
        is_by_row = isinstance(mask, mx.array) and (mask.ndim, self.ndim) == (4, 5)
        return mx.expand_dims(mask, 2) if is_by_row else mask

    def _are_weights_of(self, values: Any) -> bool:
        """Whether these are the values that belong to the keys of the scores."""
        if not isinstance(values, ReadArray) or values.read is not self.read:
            return False
        is_as_read = values.holds_values and values.is_as_held and not values.is_changed
        return is_as_read and values.ndim == self.ndim

    def _is(self, made: Made) -> bool:
        return self.made == made and not self.is_changed

    def _is_capped_by(self, factor: Any) -> bool:
        return self._is("tanh") and isinstance(factor, int | float) and factor == self.softcap

    def _followed_by(self, result: mx.array, made: Made, **others: Any) -> AttentionScores:
        scores = AttentionScores(result)
        vars(scores).update(vars(self), made=made, **others)
        return scores


def hides(mask: Any, lowest: Any, dtype: mx.Dtype) -> bool:
    """Whether a softmax gives no weight to scores that mx.where(mask, scores, lowest) replaces."""
    return isinstance(mask, mx.array) and bool(_number(lowest) <= mx.finfo(dtype).min)


def _number(value: Any) -> float:
    """A number, or the number in an array of one; 0 for other arrays."""
    if isinstance(value, mx.array):
        value = value.item() if value.size == 1 else 0
    return float(value)
