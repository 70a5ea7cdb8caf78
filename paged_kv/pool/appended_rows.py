"""Describes layers that append rows at a rate of their own: one row for each group of tokens.

Each token of a group holds its share of the group's row in pages, half of it as the key and half as
the value. So a block covers the same 256 tokens in these layers as in all others, and everything
that counts, shares, trims, evicts and stores tokens needs to know nothing of rows. A page has 256
tokens, so a group never reaches into the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from paged_kv.kernels.pages.page_format import LayerGeometry


@dataclass(frozen=True)
class RowInput:
    """What each token of an open group adds to it.

    Attributes:
        name: the model's name of it.
        dim: numbers of a token.
        dtype: of the numbers.
    """

    name: str
    dim: int
    dtype: mx.Dtype


@dataclass(frozen=True)
class AppendedRows:
    """The rows of one layer.

    Attributes:
        name: the model's name of them.
        rate: tokens of a group, a power of two up to 256.
        dim: numbers of a row; each token of the group holds an equal share, in two halves. Zeros
            fill up a row that cannot be divided so.
        dtype: of the numbers.
        inputs: what a row is computed from, once its group is closed.
    """

    name: str
    rate: int
    dim: int
    dtype: mx.Dtype
    inputs: tuple[RowInput, ...] = ()

    @property
    def geometry(self) -> LayerGeometry:
        """The shape of a token's share of a row."""
        half = -(-self.dim // (2 * self.rate))
        return LayerGeometry(1, half, self.dtype, 1, half, self.dtype)

    def shares(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Rows [1, count, dim] as keys and values [1, 1, count * rate, half a share]."""
        half = self.geometry.k_dim
        missing = 2 * half * self.rate - self.dim
        filled = mx.pad(rows, [(0, 0), (0, 0), (0, missing)]) if missing else rows
        shares = filled.reshape(1, 1, -1, 2 * half)
        return shares[..., :half], shares[..., half:]

    def rows(self, keys: mx.array, values: mx.array) -> mx.array:
        """The rows [1, count, dim] of whole groups' keys and values; the inverse of `shares`."""
        half = self.geometry.k_dim
        joined: mx.array = mx.concatenate([keys, values], axis=3)
        return joined.reshape(1, -1, 2 * half * self.rate)[..., : self.dim]
