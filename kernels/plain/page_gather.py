"""Gathers keys and values from pages, lazily.

A slab may be written in place once its reads are computed. So `gather` never returns a view of a
slab: once computed, the result has memory of its own.

Usually all pages of a batch have one format, and `gather_alike` gathers them in one pass. Sequence
by sequence, a step of 8 sequences at 256 tokens of a 6-layer model takes 1.1 times as long.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.layer_memory import LayerMemory, Slab
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageLayout


@dataclass(frozen=True)
class Alignment:
    """Aligns sequences of different lengths at their ends. Output token t of a sequence is token
    t + shift of its pages, and is valid in [begin, end). Each array is int32 [B, 1, 1, 1]."""

    shift: mx.array
    begin: mx.array
    end: mx.array


@dataclass(frozen=True)
class TokenPlaces:
    """Where the tokens of a batch are, with the pages concatenated sequence by sequence.

    Attributes:
        page_ids: the batch's pages in each slab, int32 [pages of that slab]. With a single slab,
            int32 [B, pages of the longest sequence], already in table order.
        order: indices of each sequence's pages among those of all slabs, int32 [B, pages of the
            longest sequence]. None with a single slab.
        length: T, the tokens of the longest sequence with its padding.
        first: the index of a sequence's first token in its pages.
        alignment: set if the sequences differ in `first` or length; then `first` is not used.
    """

    page_ids: dict[int, mx.array]
    order: mx.array | None
    length: int
    first: int
    alignment: Alignment | None


def token_places(metadata: AttentionMetadata, slab_stride: int) -> TokenPlaces | None:
    """Where the batch's tokens are; None if it has none, or has sink tokens. Made once for all
    layers that read the same batch."""
    if "token_places" not in metadata.memo:
        metadata.memo["token_places"] = _new_token_places(metadata, slab_stride)
    places: TokenPlaces | None = metadata.memo["token_places"]
    return places


def are_alike(pages: LayerMemory, places: TokenPlaces) -> bool:
    """Whether all pages of the batch have one format."""
    layouts = [pages.slabs[slab].layout for slab in places.page_ids]
    return all(layout == layouts[0] for layout in layouts[1:])


def gather_alike(pages: LayerMemory, places: TokenPlaces) -> tuple[mx.array, mx.array]:
    """See `Backend.gather`; all pages must have one format."""
    layout = pages.slabs[next(iter(places.page_ids))].layout
    planes = []
    for number, plane in enumerate(layout.planes):
        parts = [pages.slabs[slab].planes[number][ids] for slab, ids in places.page_ids.items()]
        chosen = parts[0] if places.order is None else mx.concatenate(parts)[places.order]
        batch, count = chosen.shape[:2]
        shape = (batch, plane.heads, count * plane.slots, plane.slot_words)
        planes.append(chosen.swapaxes(1, 2).reshape(shape))
    keys, values = layout.page_format.decode(pages.geometry, planes)
    return _aligned(keys, places), _aligned(values, places)


def _new_token_places(metadata: AttentionMetadata, slab_stride: int) -> TokenPlaces | None:
    if metadata.head_tokens or not any(metadata.block_tables):
        return None
    length = max(metadata.ends)
    firsts = np.array(metadata.first_tokens or [0] * len(metadata.ends), np.int32)
    begins = length - np.array(metadata.ends, np.int32)
    ends = length - np.array(metadata.right_padding, np.int32)
    alignment = None
    if np.ptp(firsts) or begins.any() or (ends < length).any():
        four = [mx.array(each[:, None, None, None]) for each in (firsts - begins, begins, ends)]
        alignment = Alignment(*four)
    page_ids, order = _by_slab(metadata.block_table_array, slab_stride)
    return TokenPlaces(page_ids, order, length, int(firsts[0]), alignment)


def _by_slab(
    tables: npt.NDArray[np.int32], slab_stride: int
) -> tuple[dict[int, mx.array], mx.array | None]:
    """The pages of each slab, and their order in the tables; see `TokenPlaces`."""
    slabs, pages = np.divmod(tables, np.int32(slab_stride))
    if (slabs == slabs[0, 0]).all():
        return {int(slabs[0, 0]): mx.array(pages)}, None
    by_slab = np.argsort(slabs, axis=None, kind="stable")
    order = np.empty(tables.size, np.int32)
    order[by_slab] = np.arange(tables.size)
    page_ids = {int(slab): mx.array(pages[slabs == slab]) for slab in np.unique(slabs)}
    return page_ids, mx.array(order.reshape(tables.shape))


def _aligned(tokens: mx.array, places: TokenPlaces) -> mx.array:
    """The valid tokens of [B, heads, tokens of all pages, dim], aligned, with zeros as padding."""
    alignment = places.alignment
    if alignment is None:
        return tokens[:, :, places.first : places.first + places.length]
    at = mx.arange(places.length)[:, None]
    is_own = (at >= alignment.begin) & (at < alignment.end)
    indices = mx.where(is_own, at + alignment.shift, 0)
    return mx.where(is_own, mx.take_along_axis(tokens, indices, axis=2), 0)


def gather(
    pages: LayerMemory, metadata: AttentionMetadata, unwritten: Unwritten | None
) -> tuple[mx.array, mx.array]:
    """See `Backend.gather`."""
    is_batch = len(metadata.context_lens) > 1
    if is_batch and unwritten is not None and unwritten[0].shape[2] == 1 and metadata.ends_in_own:
        return _joined([gather(pages, metadata.but_latest, None), unwritten])
    if is_batch and unwritten is None:
        places = token_places(metadata, pages.slab_stride)
        if places is not None and are_alike(pages, places):
            return gather_alike(pages, places)
    length = max(metadata.ends)
    per_row = [
        read_row(pages, metadata, row, unwritten, own_memory=True)
        for row in range(len(metadata.context_lens))
    ]
    keys, values = zip(*per_row, strict=True)
    return stacked(length, keys, metadata.right_padding), stacked(
        length, values, metadata.right_padding
    )


def read_row(
    pages: LayerMemory,
    metadata: AttentionMetadata,
    row: int,
    unwritten: Unwritten | None,
    *,
    own_memory: bool = False,
) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, tokens, dim] of a sequence's valid tokens. They may be views of
    its pages unless `own_memory` is set."""
    tokens = _tokens_of(metadata, row, unwritten[0].shape[2] if unwritten else 0, pages.slab_stride)
    own_memory = own_memory and len(tokens.in_pages) == 1 and not unwritten
    parts = [_read_pages(pages, each, own_memory=own_memory) for each in tokens.in_pages]
    if unwritten:
        first, end = tokens.in_step.start, tokens.in_step.stop
        keys, values = (part[row : row + 1, :, first:end] for part in unwritten)
        parts.append((keys, values))
    return _joined(parts) if parts else _no_tokens(pages)


Run = tuple[int, int, int]
"""Adjacent pages: their slab, the first page, and their number."""


@dataclass(frozen=True)
class _InPages:
    """The tokens [first, end) of the concatenated pages of some runs."""

    runs: list[Run]
    first: int
    end: int


@dataclass(frozen=True)
class _RowTokens:
    """Where a sequence's valid tokens are: in pages, followed by unwritten keys and values."""

    in_pages: list[_InPages]
    in_step: range


def _tokens_of(metadata: AttentionMetadata, row: int, num_new: int, slab_stride: int) -> _RowTokens:
    """Made once for all layers that read the same batch."""
    memo: dict[tuple[int, int], _RowTokens] = metadata.memo.setdefault("row_tokens", {})
    if (row, num_new) not in memo:
        memo[row, num_new] = _find_tokens(metadata, row, num_new, slab_stride)
    return memo[row, num_new]


def _find_tokens(
    metadata: AttentionMetadata, row: int, num_new: int, slab_stride: int
) -> _RowTokens:
    in_step = metadata.valid_tokens(num_new)[row]
    head, others = metadata.valid_ranges(row)
    in_pages = []
    for tokens in (head, range(others.start, others.stop - len(in_step))):
        if tokens:
            base, last = tokens.start // PAGE_SIZE, -(-tokens.stop // PAGE_SIZE)
            runs = list(_page_runs(metadata.block_tables[row][base:last], slab_stride))
            first = tokens.start - base * PAGE_SIZE
            in_pages.append(_InPages(runs, first, first + len(tokens)))
    return _RowTokens(in_pages, in_step)


def _page_runs(table: tuple[int, ...], slab_stride: int) -> Iterator[Run]:
    """The longest runs of adjacent pages, in table order."""
    start = 0
    for end in range(1, len(table) + 1):
        # The first page of a slab may have the number after the last one of the slab before.
        side_by_side = end < len(table) and table[end] == table[end - 1] + 1
        if side_by_side and table[end] % slab_stride:
            continue
        slab, page = divmod(table[start], slab_stride)
        yield slab, page, end - start
        start = end


def _read_pages(
    pages: LayerMemory, tokens: _InPages, *, own_memory: bool
) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, tokens, dim]."""
    parts = [
        _decoded(pages, layout, list(alike), own_memory=own_memory)
        for layout, alike in groupby(tokens.runs, lambda run: pages.slabs[run[0]].layout)
    ]
    keys, values = _joined(parts)
    return keys[:, :, tokens.first : tokens.end], values[:, :, tokens.first : tokens.end]


def _decoded(
    pages: LayerMemory, layout: PageLayout, runs: list[Run], *, own_memory: bool
) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, tokens, dim] of whole pages of one format."""
    planes = []
    for at, plane in enumerate(layout.planes):
        parts = [_plane(pages.slabs[slab], at, page, count) for slab, page, count in runs]
        joined = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        slots = joined.shape[2] * plane.slots
        planes.append(joined.reshape(1, plane.heads, slots, plane.slot_words))
    if own_memory and len(runs) == 1 and _is_view(layout, runs[0][2]):
        planes = [plane + 0 for plane in planes]
    return layout.page_format.decode(pages.geometry, planes)


def _plane(slab: Slab, plane: int, page: int, count: int) -> mx.array:
    """Words [1, heads, pages, head_words] of one plane of adjacent pages: a view."""
    layout = slab.layout
    heads, head_words = layout.planes[plane].heads, layout.planes[plane].head_words
    return mx.as_strided(
        slab.memory,
        (1, heads, count, head_words),
        (0, head_words, layout.page_words, 1),
        page * layout.page_words + layout.offsets[plane],
    )


def _is_view(layout: PageLayout, count: int) -> bool:
    """Whether a plane of `count` adjacent pages has no gaps."""
    return count == 1 or sum(plane.words > 0 for plane in layout.planes) == 1


def _no_tokens(pages: LayerMemory) -> tuple[mx.array, mx.array]:
    geometry = pages.geometry
    return (
        mx.zeros((1, geometry.k_heads, 0, geometry.k_dim), geometry.k_dtype),
        mx.zeros((1, geometry.v_heads, 0, geometry.v_dim), geometry.v_dtype),
    )


def _joined(parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Concatenate parts along tokens."""
    if len(parts) == 1:
        return parts[0]
    keys, values = map(list, zip(*parts, strict=True))
    return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)


def stacked(length: int, rows: tuple[mx.array, ...], right_padding: tuple[int, ...]) -> mx.array:
    """Stack sequences [1, heads, tokens, dim], each followed by its right padding, to
    [B, heads, length, dim]."""
    if len(rows) == 1 and not right_padding[0]:
        return rows[0]
    return mx.concatenate(
        [
            mx.pad(row, [(0, 0), (0, 0), (length - padding - row.shape[2], padding), (0, 0)])
            for row, padding in zip(rows, right_padding, strict=True)
        ]
    )
