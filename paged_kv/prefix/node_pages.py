"""Finds the pages that a node of the prefix index holds, copies them out of the pool as bytes, and
loads them back: for the tier below memory."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.allocator.prefixes.prefix_node import Node
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageLayout, page_format_named
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.sequence import Sequence

Words = npt.NDArray[np.uint16]


def block_bytes(group: LayerGroup, block: int) -> dict[str, Words]:
    """A full block's page of every layer, uint16 [page_units, unit_words]."""
    views = {layer: pages.page(block) for layer, pages in group.pages.items()}
    mx.eval(list(views.values()))
    return {f"layer.{layer}": np.array(view) for layer, view in views.items()}


def load_blocks(
    pool: PagePool,
    group: LayerGroup,
    sequence: Sequence,
    formats: abc.Sequence[str],
    contents: abc.Sequence[Mapping[str, Words]],
) -> None:
    """Append blocks to a sequence, with pages that `block_bytes` returned.

    Raises:
        ValueError: the pages do not have the layers' shapes.
        PoolExhausted: the budget does not hold the blocks.
    """
    for name, content in zip(formats, contents, strict=True):
        _require_pages(group, name, content)
    table = sequence.table(group)
    first = len(table.blocks)
    pool.append_blocks(group, table, list(formats))
    for layer, pages in group.pages.items():
        arrays = [mx.array(content[f"layer.{layer}"]) for content in contents]
        pages.load(dict(zip(table.blocks[first:], arrays, strict=True)))


def _require_pages(group: LayerGroup, page_format: str, content: Mapping[str, Words]) -> None:
    known = page_format_named(page_format)
    layouts = {
        f"layer.{layer}": PageLayout(known, pages.geometry) for layer, pages in group.pages.items()
    }
    shapes = {name: (layout.page_units, layout.unit_words) for name, layout in layouts.items()}
    found = {name: array.shape for name, array in content.items()}
    if found != shapes:
        raise ValueError(f"pages of shapes {shapes} are needed, got {found}")


def full_page(group: LayerGroup, node: Node) -> int | None:
    """The block with the page of a full node; None if none is cached. In a group with a window, it
    is one that holds all of the node's tokens, in or out of the window."""
    if group.window is None:
        return node.blocks.get(group.allocator)
    for slots in node.slots_of(group.allocator):
        if slots.out_of_window.block is not None and (slots.first, slots.last) == (0, PAGE_SIZE):
            return slots.out_of_window.block
    return None
