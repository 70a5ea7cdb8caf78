"""Copies whole pages of one layer of a sequence out of a pool and into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageLayout, page_format_named
from paged_kv.sizes import counted

if TYPE_CHECKING:
    from paged_kv.pool.page_pool import PagePool
    from paged_kv.steps.sequence import Sequence


def page_views(pool: PagePool, layer: int, sequence: Sequence) -> list[mx.array]:
    """Views of a sequence's pages in a layer, in table order.

    Do not keep them: a later write may show in them, or may have to copy the whole slab.
    """
    group = pool.group_of(layer)
    return [group.pages[layer].page(block) for block in _held(pool, layer, sequence)]


def page_formats(pool: PagePool, layer: int, sequence: Sequence) -> list[str]:
    """The formats of the pages of `page_views`."""
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
    """Fill an empty layer of a sequence with pages of `page_views`, in the formats of
    `page_formats`. If the pool requantised the group's blocks since its first layer was filled,
    these pages are requantised too.

    Raises:
        ValueError: the pages do not fit the layer, or are not as many as the tokens need.
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
                f"layer {layer} needs {counted(needed, 'page')} for "
                f"{counted(context_len, 'token')}, of shapes {shapes} in words, got {found}"
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
    """The sequence's blocks that hold tokens of a layer."""
    group, tokens = pool.group_of(layer), sequence.progress(layer).tokens
    held = _pages_held(pool, layer, tokens, sequence.written(group))
    return sequence.blocks(group)[:held]


def _pages_held(pool: PagePool, layer: int, context_len: int, written_len: int) -> int:
    """Number of table entries that hold tokens of a layer: all entries of a ring that wrapped."""
    window = pool.windows.get(layer)
    if window is not None and window.first_held(written_len):
        return window.ring.size
    return -(-context_len // PAGE_SIZE)
