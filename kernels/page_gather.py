"""Keys and values collected from pages, lazily.

A slab may be written in place once what was read from it has been computed. So what `gather`
gives never is a view of a slab: computed, it has memory of its own.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlx.core as mx

from paged_kv.kernels.page_format import PAGE_SIZE, WORD, Plane
from paged_kv.kernels.page_rows import PageRows, Tail

if TYPE_CHECKING:
    from paged_kv.kernels.layer_pages import LayerPages


def gather(pages: "LayerPages", rows: PageRows, tail: Tail | None) -> tuple[mx.array, mx.array]:
    """See `Backend.gather`."""
    length = max(rows.ends)
    per_row = [
        read_row(pages, rows, row, tail, own_memory=True) for row in range(len(rows.context_lens))
    ]
    keys, values = zip(*per_row, strict=True)
    return _stack(length, keys, rows.right_padding), _stack(length, values, rows.right_padding)


def read_row(
    pages: "LayerPages",
    rows: PageRows,
    row: int,
    tail: Tail | None,
    *,
    own_memory: bool = False,
) -> tuple[mx.array, mx.array]:
    """Keys and values [heads, tokens, dim] of a row's own tokens; views of its pages where that is
    possible and no memory of their own is asked for."""
    own = rows.own_tokens(tail[0].shape[2])[row] if tail else range(0)
    table = rows.block_tables[row]
    head, others = rows.own_ranges(row)
    in_pages = range(others.start, others.stop - len(own))
    if not head and not tail:
        return _read_pages(pages, table, in_pages, own_memory=own_memory)
    parts = [_read_pages(pages, table, tokens) for tokens in (head, in_pages)]
    if tail:
        parts.append((tail[0][row, :, own.start : own.stop], tail[1][row, :, own.start : own.stop]))
    keys, values = map(list, zip(*parts, strict=True))
    return mx.concatenate(keys, axis=1), mx.concatenate(values, axis=1)


def _read_pages(
    pages: "LayerPages", table: tuple[int, ...], tokens: range, *, own_memory: bool = False
) -> tuple[mx.array, mx.array]:
    """Keys and values [heads, tokens, dim] of some of a table's tokens."""
    base = tokens.start // PAGE_SIZE
    first, end = tokens.start - base * PAGE_SIZE, tokens.stop - base * PAGE_SIZE
    runs = list(_page_runs(pages, table[base : base - (-end // PAGE_SIZE)]))
    planes = []
    for plane, offset in zip(pages.layout.planes, pages.layout.offsets, strict=True):
        parts = [_plane(pages, plane, offset, run) for run in runs]
        if not parts:
            parts = [mx.zeros((plane.heads, 0, plane.row_words), dtype=WORD)]
        whole = mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        rows = whole[:, first:end]
        planes.append(rows + 0 if own_memory and len(runs) == 1 else rows)
    return pages.page_format.decode(pages.geometry, planes)


Run = tuple[int, int, int]
"""Pages that lie side by side: their slab, the first of them, and how many they are."""


def _plane(pages: "LayerPages", plane: Plane, offset: int, run: Run) -> mx.array:
    """Words [heads, tokens, row_words] of one plane of a run of pages: a view, if it can be one."""
    slab, page, count = run
    words, page_words = plane.row_words, pages.layout.page_words
    view = mx.as_strided(
        pages.slabs[slab],
        (plane.heads, count, PAGE_SIZE, words),
        (PAGE_SIZE * words, page_words, words, 1),
        page * page_words + offset,
    )
    return view.reshape(plane.heads, count * PAGE_SIZE, words)


def _page_runs(pages: "LayerPages", table: tuple[int, ...]) -> Iterator[Run]:
    """The longest runs of pages that lie side by side, in table order."""
    start = 0
    for end in range(1, len(table) + 1):
        # The first page of a slab may have the number after the last one of the slab before.
        side_by_side = end < len(table) and table[end] == table[end - 1] + 1
        if side_by_side and table[end] % pages.slab_stride:
            continue
        slab, page = divmod(table[start], pages.slab_stride)
        yield slab, page, end - start
        start = end


def _stack(length: int, rows: tuple[mx.array, ...], right_padding: tuple[int, ...]) -> mx.array:
    """[B, heads, length, dim] of rows [heads, tokens, dim] that end where their padding begins."""
    if len(rows) == 1 and not right_padding[0]:
        return rows[0][None]
    return mx.stack(
        [
            mx.pad(row, [(0, 0), (length - padding - row.shape[1], padding), (0, 0)])
            for row, padding in zip(rows, right_padding, strict=True)
        ]
    )
