"""Defines what layers hold that do not keep the keys and values of all tokens: a sliding window and
the ring of pages that holds it, or rows.

A query attends to the `size` tokens that end with itself, and to the first `sink_tokens` tokens.
The pages of those, the head, are never overwritten. A ring of `entries` pages holds the last
`entries * 256` tokens after the head. It is so large that a step of at most `write_chunk` tokens
overwrites no token that its queries see:

    entries = ceil((size + write_chunk - 1) / 256)

Other layers append rows at a rate of their own: one row for each group of tokens. Each token of a
group holds its share of the group's row in pages, half of it as the key and half as the value. So a
block covers the same 256 tokens in these layers as in all others, and everything that counts,
shares, trims, evicts and stores tokens needs to know nothing of rows. A page has 256 tokens, so a
group never reaches into the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from paged_kv.allocator.ring import Ring
from paged_kv.checks import counted, described
from paged_kv.kernels.pages.page_format import PAGE_SIZE, LayerGeometry

DEFAULT_WRITE_CHUNK = 256


@dataclass(frozen=True)
class Window:
    """The window of the layers of a group.

    Attributes:
        size: tokens that a query sees, itself included, besides the sink tokens.
        write_chunk: the longest step that is written before its queries attend.
        sink_tokens: first tokens of the sequence, which every query sees.

    Raises:
        ValueError: a number is out of its range.
    """

    size: int
    write_chunk: int
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.sink_tokens < 0:
            raise ValueError(
                f"a window needs at least 1 token and at least 0 sink tokens, got {self.size} "
                f"and {self.sink_tokens}"
            )
        if not 1 <= self.write_chunk <= self.size:
            raise ValueError(
                f"write_chunk must lie in [1, {self.size}], the window, got {self.write_chunk}: "
                "a longer step is attended to before it is written, so it needs no larger ring"
            )

    @cached_property
    def ring(self) -> Ring:
        """How block tables reuse their entries."""
        entries = -(-(self.size + self.write_chunk - 1) // PAGE_SIZE)
        return Ring(entries, -(-self.sink_tokens // PAGE_SIZE), self.size, self.sink_tokens)

    @property
    def capacity(self) -> int:
        """Tokens after the head that the ring holds."""
        return self.ring.entries * PAGE_SIZE

    @property
    def head_end(self) -> int:
        """The position after the last slot of the head's pages."""
        return self.ring.head * PAGE_SIZE

    def first_visible(self, before: int) -> int:
        """The first position inside the window of a query with `before` tokens before it."""
        return max(0, before - self.size + 1)

    def kept_parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of positions [start, end) that are still held after all were written."""
        head = (start, min(end, self.head_end))
        rest = (max(start, self.head_end, end - self.capacity), end)
        return [part for part in (head, rest) if part[0] < part[1]]

    def first_held(self, written: int) -> int:
        """The first position after the head that is not overwritten once `written` tokens have been
        written; 0 if none is overwritten."""
        return max(0, written - self.capacity) if written - self.head_end > self.capacity else 0

    def shortest_rollback(self, written: int) -> int:
        """The shortest length to which a sequence can be trimmed and still hold its window."""
        first_held = self.first_held(written)
        return 0 if first_held == 0 else first_held + self.size - 1


def checked_windows(windows: Mapping[int, Window] | None, num_layers: int) -> dict[int, Window]:
    """The windows by layer.

    Raises:
        TypeError, ValueError: they are no windows, or of no such layers.
    """
    if not isinstance(windows, Mapping | None):
        raise TypeError(f"windows must map layers to Windows, got {described(windows)}")
    for layer, window in (windows or {}).items():
        if not isinstance(window, Window):
            raise TypeError(f"windows must map layers to Windows, got {described(window)}")
        if layer not in range(num_layers):
            known = f"a pool of {counted(num_layers, 'layer')}, which count from 0"
            raise ValueError(f"windows must be of the layers of {known}, got {described(layer)}")
    return dict(windows or {})


@dataclass(frozen=True)
class RowInput:
    """What each token of an open group adds to it."""

    name: str  # the model's name of it
    dim: int  # numbers of a token
    dtype: mx.Dtype


@dataclass(frozen=True)
class AppendedRows:
    """The rows of one layer. Each token of a group holds an equal share of its row, in two halves.
    Zeros fill up a row that cannot be divided so."""

    name: str  # the model's name of them
    rate: int  # tokens of a group, a power of two up to 256
    dim: int  # numbers of a row
    dtype: mx.Dtype
    inputs: tuple[RowInput, ...] = ()  # what a row is computed from, once its group is closed

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
