"""Whole pages of one layer of a sequence, out of a pool and into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageLayout, page_format_named

if TYPE_CHECKING:
    from paged_kv.pool.page_pool import PagePool
    from paged_kv.sequences.sequence import Sequence


def page_views(pool: PagePool, layer: int, sequence: Sequence) -> list[mx.array]:
    """Views of a layer's pages of a sequence, in the order of its table; they cost nothing.

    A later write may show in them, or may have to copy the whole slab: never keep them.
    """
    group = pool.group_of(layer)
    return [group.pages[layer].page(block) for block in _held(pool, layer, sequence)]


def page_formats(pool: PagePool, layer: int, sequence: Sequence) -> list[str]:
    """The formats of those pages."""
    group = pool.group_of(layer)
    return [group.allocator.format_of(block).name for block in _held(pool, layer, sequence)]


def load_pages(
    pool: PagePool,
    layer: int,
    sequence: Sequence,
    geometry: LayerGeometry,
    context_len: int,
    written_len: int,
    formats: list[str],
    contents: list[mx.array],
) -> None:
    """Fill a layer of a sequence that is empty there, with pages as `page_views` gave them, of the
    formats that `page_formats` gave. Where memory ran short since the first layer of the group was
    filled, its blocks may have become smaller, and the pages of this one become so too.

    Raises:
        ValueError: the pages are not what the layer holds, or not as many as the tokens need.
        PoolExhausted: the budget does not hold them; nothing was changed.
    """
    group = pool.group_of(layer)
    with pool.lock:
        pages = group.open_layer(layer, geometry)
        layouts = [PageLayout(page_format_named(name), geometry) for name in formats]
        shapes = [(layout.page_units, layout.unit_words) for layout in layouts]
        needed = _pages_held(pool, layer, context_len, written_len)
        found = [tuple(content.shape) for content in contents]
        if len(formats) != needed or found != shapes:
            raise ValueError(
                f"layer {layer} needs {needed} pages for {context_len} tokens, and its formats "
                f"pages of {shapes} words, got {found}"
            )
        table = sequence.table(group)
        pool.append_blocks(group, table, formats[len(table.blocks) :])
        pages.load(
            {
                block: layout.recoded(content, pages.layout_of(block))
                for block, layout, content in zip(table.blocks, layouts, contents, strict=False)
            }
        )
        sequence.restore(layer, context_len, written_len)
        table.rewind(context_len)


def _held(pool: PagePool, layer: int, sequence: Sequence) -> tuple[int, ...]:
    """The blocks that hold tokens of a layer."""
    lengths = sequence.context_lens[layer], sequence.written_lens[layer]
    return sequence.blocks(pool.group_of(layer))[: _pages_held(pool, layer, *lengths)]


def _pages_held(pool: PagePool, layer: int, context_len: int, written_len: int) -> int:
    """Entries of a table that hold tokens of a layer: all of a ring that was used again."""
    window = pool.windows.get(layer)
    if window is not None and window.first_held(written_len):
        return window.ring.size
    return -(-context_len // PAGE_SIZE)
