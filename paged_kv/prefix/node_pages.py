"""Finds the pages that a node of the prefix index holds, copies them out of the pool as bytes, and
loads them back: for the tier below memory."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.allocator.prefixes.prefix_node import Node
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageLayout, page_format_named
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.pool.window import Window
from paged_kv.prefix.window_prefixes import window_prefix
from paged_kv.steps.sequence import Sequence

Words = npt.NDArray[np.uint16]


def block_bytes(group: LayerGroup, block: int, unused: slice) -> dict[str, Words]:
    """A block's page of every layer, uint16 [page_units, unit_words]. Unused slots are zeros, not
    their earlier content."""
    views = {layer: pages.page(block) for layer, pages in group.pages.items()}
    mx.eval(list(views.values()))
    contents = {}
    for layer, view in views.items():
        content = np.array(view)
        _clear_slots(content, group.pages[layer].layout_of(block), unused)
        contents[f"layer.{layer}"] = content
    return contents


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


def _clear_slots(content: Words, layout: PageLayout, unused: slice) -> None:
    flat = content.reshape(-1)
    for plane, offset in zip(layout.planes, layout.offsets, strict=True):
        slots = flat[offset : offset + plane.words]
        if plane.slots == PAGE_SIZE:
            slots.reshape(plane.heads, PAGE_SIZE, plane.slot_words)[:, unused] = 0
    if layout.summaries is not None and unused.start < PAGE_SIZE:
        flat[layout.summaries_at :] = 0  # a page that is not full has none yet


def _require_pages(group: LayerGroup, page_format: str, content: Mapping[str, Words]) -> None:
    known = page_format_named(page_format)
    layouts = {
        f"layer.{layer}": PageLayout(known, pages.geometry) for layer, pages in group.pages.items()
    }
    shapes = {name: (layout.page_units, layout.unit_words) for name, layout in layouts.items()}
    found = {name: array.shape for name, array in content.items()}
    if found != shapes:
        raise ValueError(f"pages of shapes {shapes} are needed, got {found}")


@dataclass(frozen=True)
class NodePage:
    """A node's page.

    Attributes:
        block: its id.
        unused: slots that hold nothing of this prefix.
        written: tokens that the ring had been written with when this was its last page.
    """

    block: int
    unused: slice
    written: int


def node_page(group: LayerGroup, path: abc.Sequence[Node], at: int, end: int) -> NodePage | None:
    """The page of the first `end` tokens of node `path[at]`; None if it is not cached or not
    reusable. `path` begins at the prefix's first block.

    In a group with a window the page is either a full one, which may belong to many rings, or the
    last one of a ring that is cached whole. Once the ring has wrapped around, its last page also
    holds slots of an earlier page.
    """
    node, num_tokens = path[at], at * PAGE_SIZE + end
    if group.window is None:
        block = node.blocks.get(group.allocator)
        return None if block is None else NodePage(block, slice(end, PAGE_SIZE), num_tokens)
    if end < PAGE_SIZE:
        return _last_of_ring(group, group.window, path, num_tokens)
    for slots in node.slots_of(group.allocator):
        if slots.out_of_window.block is not None and (slots.first, slots.last) == (0, PAGE_SIZE):
            return NodePage(slots.out_of_window.block, slice(0), num_tokens)
    return None


def path_to(node: Node) -> list[Node]:
    """The nodes from a prefix's first block to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _last_of_ring(
    group: LayerGroup, window: Window, path: abc.Sequence[Node], num_tokens: int
) -> NodePage | None:
    known = window_prefix(path, num_tokens, window, group.allocator)
    if known is None:
        return None
    page, end = divmod(num_tokens, PAGE_SIZE)
    block = known.pages[window.ring.entry(page)].block
    assert block is not None
    was_used_again = window.first_held(known.written) > 0
    used_again = known.written - page * PAGE_SIZE if was_used_again else PAGE_SIZE
    return NodePage(block, slice(end, used_again), known.written)
