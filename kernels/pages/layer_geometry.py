"""Defines the shape of the keys and values of one layer."""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


@dataclass(frozen=True)
class LayerGeometry:
    """Heads, head sizes and dtypes of a layer's keys and of its values, which may differ.

    Attributes:
        has_summaries: whether pages hold summaries of their keys too.
    """

    k_heads: int
    k_dim: int
    k_dtype: mx.Dtype
    v_heads: int
    v_dim: int
    v_dtype: mx.Dtype
    has_summaries: bool = False

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> "LayerGeometry":
        """The geometry of keys and values [batch, heads, tokens, dim].

        Raises:
            ValueError: they do not have four dimensions, or differ in batch or tokens.
        """
        if keys.ndim != 4 or values.ndim != 4:
            raise ValueError(
                "keys and values must be [batch, heads, tokens, dim], "
                f"got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            raise ValueError(
                "keys and values must have the same batch and tokens, "
                f"got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        return cls(
            k_heads=keys.shape[1],
            k_dim=keys.shape[3],
            k_dtype=keys.dtype,
            v_heads=values.shape[1],
            v_dim=values.shape[3],
            v_dtype=values.dtype,
        )

    @cached_property
    def is_alike(self) -> bool:
        """Whether keys and values have the same shape and dtype."""
        keys = self.k_heads, self.k_dim, self.k_dtype
        return keys == (self.v_heads, self.v_dim, self.v_dtype)

    def fits(self, keys: mx.array, values: mx.array) -> bool:
        """Whether keys and values [batch, heads, tokens, dim] have this geometry."""
        return (
            keys.ndim == values.ndim == 4
            and keys.shape[::2] == values.shape[::2]
            and (self.k_heads, self.k_dim) == keys.shape[1::2]
            and (self.v_heads, self.v_dim) == values.shape[1::2]
            and (self.k_dtype, self.v_dtype) == (keys.dtype, values.dtype)
        )

    def __str__(self) -> str:
        keys = f"({self.k_heads}, {self.k_dim}) {_name(self.k_dtype)}"
        values = f"({self.v_heads}, {self.v_dim}) {_name(self.v_dtype)}"
        both = keys if keys == values else f"keys {keys} and values {values}"
        return f"{both} with summaries" if self.has_summaries else both
