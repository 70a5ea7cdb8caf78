"""Pages through plain MLX operations: correct on every device, and what faster backends are
tested against.

MLX arrays are values. A slab is written by replacing it with the result of a scatter, which MLX
does in the slab's own memory when nobody else holds it. A read that is still in flight does hold
it, and the write would copy the whole slab; so a write first waits for the stream to be idle.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.attention_mask import context_mask
from paged_kv.kernels.page_format import PAGE_SIZE, WORD, Plane
from paged_kv.kernels.page_rows import PageRows

if TYPE_CHECKING:
    from paged_kv.kernels.layer_pages import LayerPages

Indices = npt.NDArray[np.int64]


class PlainBackend:
    """See `Backend` for the operations."""

    name = "plain"

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        slab = mx.zeros((pages * page_units, unit_words), dtype=WORD)
        mx.eval(slab)
        return slab

    def write(self, pages: "LayerPages", keys: mx.array, values: mx.array, rows: PageRows) -> None:
        mx.synchronize()
        entries, token_rows = _last_tokens(rows, keys.shape[2])
        slabs, page_ids = np.divmod(entries, pages.slab_stride)
        layout = pages.layout
        encoded = pages.page_format.encode(keys, values)
        for plane, offset, plane_rows in zip(layout.planes, layout.offsets, encoded, strict=True):
            if not plane.words:
                continue
            first = page_ids * layout.page_units + offset // layout.unit_words
            indices = _row_indices(first, token_rows, plane, layout.unit_words)
            updates = plane_rows.transpose(0, 2, 1, 3).reshape(*indices.shape, -1)
            for slab in np.unique(slabs):
                mine = np.flatnonzero(slabs == slab)
                target = mx.array(indices[mine].reshape(-1))
                chosen = updates if len(mine) == len(slabs) else updates[mx.array(mine)]
                pages.slabs[int(slab)][target] = chosen.reshape(-1, layout.unit_words)

    def load(self, pages: "LayerPages", contents: Mapping[int, mx.array]) -> None:
        mx.synchronize()
        units = pages.layout.page_units
        for entry, content in contents.items():
            slab, page = divmod(entry, pages.slab_stride)
            pages.slabs[slab][page * units : (page + 1) * units] = content

    def copy(self, pages: "LayerPages", copies: Mapping[int, int]) -> None:
        # A copy of its own, evaluated: a view of the slab would make the write copy all of it.
        contents = {target: pages.page(source) + 0 for source, target in copies.items()}
        mx.eval(contents)
        self.load(pages, contents)

    def gather(self, pages: "LayerPages", rows: PageRows) -> tuple[mx.array, mx.array]:
        longest = max(rows.context_lens)
        per_row = [
            _gather_row(pages, table, length)
            for table, length in zip(rows.block_tables, rows.context_lens, strict=True)
        ]
        keys, values = zip(*per_row, strict=True)
        return _stack_ending_at(longest, keys), _stack_ending_at(longest, values)

    def attend(
        self,
        pages: "LayerPages",
        queries: mx.array,
        rows: PageRows,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        keys, values = self.gather(pages, rows)
        mask = context_mask(rows.context_lens, queries.shape[2], causal=causal, window=window)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )


def _last_tokens(rows: PageRows, count: int) -> tuple[Indices, Indices]:
    """The table entry and the page row of each row's last `count` tokens, row by row."""
    last = np.arange(-count, 0)
    positions = [length + last for length in rows.context_lens]
    entries = [
        np.array(table[at[0] // PAGE_SIZE : at[-1] // PAGE_SIZE + 1])[
            at // PAGE_SIZE - at[0] // PAGE_SIZE
        ]
        for table, at in zip(rows.block_tables, positions, strict=True)
    ]
    return np.concatenate(entries), np.concatenate(positions) % PAGE_SIZE


def _row_indices(first: Indices, token_rows: Indices, plane: Plane, unit_words: int) -> Indices:
    """Slab rows [tokens, heads, units] of tokens whose plane begins at slab row `first`."""
    units = plane.row_words // unit_words
    heads = np.arange(plane.heads)[None, :, None] * PAGE_SIZE
    in_plane = (heads + token_rows[:, None, None]) * units + np.arange(units)
    return first[:, None, None] + in_plane


def _page_runs(pages: "LayerPages", table: tuple[int, ...]) -> Iterator[mx.array]:
    """Views of the longest runs of pages that lie side by side, in table order."""
    units = pages.layout.page_units
    start = 0
    for end in range(1, len(table) + 1):
        if end < len(table) and table[end] == table[end - 1] + 1:
            continue
        slab, page = divmod(table[start], pages.slab_stride)
        yield pages.slabs[slab][page * units : (page + end - start) * units]
        start = end


def _gather_row(
    pages: "LayerPages", table: tuple[int, ...], length: int
) -> tuple[mx.array, mx.array]:
    """Keys and values [heads, length, dim] of one row."""
    used = table[: -(-length // PAGE_SIZE)]
    runs = list(_page_runs(pages, used)) or [mx.zeros((0, pages.layout.unit_words), dtype=WORD)]
    whole = runs[0] if len(runs) == 1 else mx.concatenate(runs)
    whole = whole.reshape(len(used), pages.layout.page_words)
    rows = []
    for plane, offset in zip(pages.layout.planes, pages.layout.offsets, strict=True):
        part = whole[:, offset : offset + plane.words]
        part = part.reshape(len(used), plane.heads, PAGE_SIZE, plane.row_words)
        tokens = len(used) * PAGE_SIZE
        part = part.transpose(1, 0, 2, 3).reshape(plane.heads, tokens, plane.row_words)
        rows.append(part[:, :length])
    return pages.page_format.decode(pages.geometry, rows)


def _stack_ending_at(longest: int, rows: tuple[mx.array, ...]) -> mx.array:
    """[B, heads, longest, dim] of rows [heads, length, dim], zeros before the shorter ones."""
    if len(rows) == 1:
        return rows[0][None]
    return mx.stack([mx.pad(row, [(0, 0), (longest - row.shape[1], 0), (0, 0)]) for row in rows])
