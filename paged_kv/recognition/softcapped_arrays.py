"""Defines the arrays by which attention with a softcap is recognised.

mlx-lm's attention has no softcap, so models write it out:

    keys, values = cache.update_and_fetch(...)
    keys, values = mx.expand_dims(keys, 2), mx.expand_dims(values, 2)  # with grouped queries
    scores = queries @ keys.swapaxes(-1, -2)
    scores = mx.tanh(scores / softcap)
    scores *= softcap
    scores = mx.where(mask, scores, lowest)  # if there is a mask
    output = mx.softmax(scores, axis=-1) @ values

As in `latent_arrays`, each array holds the numbers of MLX's own result, as a lazy graph, and
remembers its operands, so that the pages are read instead.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import mlx.core as mx

from paged_kv.recognition.latent_arrays import ReadArray, hides


class Made(Enum):
    """The latest operation on scores."""

    PRODUCT = auto()
    QUOTIENT = auto()
    TANH = auto()
    CAPPED = auto()
    MASKED = auto()
    WEIGHTS = auto()


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
    made = Made.PRODUCT
    softcap: float
    mask: mx.array | None = None
    lowest: Any = None

    def __truediv__(self, divisor: Any) -> mx.array:
        quotient: mx.array = super().__truediv__(divisor)
        if self._is(Made.PRODUCT) and isinstance(divisor, int | float) and divisor > 0:
            return self._followed_by(quotient, Made.QUOTIENT, softcap=divisor)
        return quotient

    def tanh(self, result: mx.array) -> mx.array:
        """`result`, which is mx.tanh(self), as scores if these were divided by a softcap."""
        return self._followed_by(result, Made.TANH) if self._is(Made.QUOTIENT) else result

    def __mul__(self, factor: Any) -> mx.array:
        product: mx.array = super().__mul__(factor)
        return self._followed_by(product, Made.CAPPED) if self._is_capped_by(factor) else product

    __rmul__ = __mul__

    def __imul__(self, factor: Any) -> mx.array:
        is_capped = self._is_capped_by(factor)
        super().__imul__(factor)
        if is_capped:
            self.made, self.is_changed = Made.CAPPED, False
        return self

    def masked(self, mask: Any, lowest: Any) -> mx.array:
        """mx.where(mask, self, lowest), where a mask [B, 1, S, T] is of all groups of heads."""
        result = mx.where(self._by_group(mask), mx.array(self), lowest)
        if self._is(Made.CAPPED) and hides(mask, lowest, self.dtype):
            return self._followed_by(result, Made.MASKED, mask=mask, lowest=lowest)
        return result

    def softmax(self, result: mx.array, axis: Any) -> mx.array:
        """`result`, which is mx.softmax(self, axis), as weights if it is over all tokens."""
        is_over_tokens = axis in (-1, self.ndim - 1)
        if is_over_tokens and (self._is(Made.CAPPED) or self._is(Made.MASKED)):
            return self._followed_by(result, Made.WEIGHTS)
        return result

    def __matmul__(self, values: Any) -> mx.array:
        if not self._is(Made.WEIGHTS) or not self._are_weights_of(values):
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
        return self.made is made and not self.is_changed

    def _is_capped_by(self, factor: Any) -> bool:
        return self._is(Made.TANH) and isinstance(factor, int | float) and factor == self.softcap

    def _followed_by(self, result: mx.array, made: Made, **others: Any) -> AttentionScores:
        """`result` as scores that came from these by an operation."""
        scores = AttentionScores(result)
        vars(scores).update(vars(self), made=made, **others)
        return scores
