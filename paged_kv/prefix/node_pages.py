"""Finds the page that a node of the prefix index holds in a layer group, for the tier below
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_kv.allocator.prefixes.prefix_node import Node
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.window import Window
from paged_kv.prefix.window_prefixes import window_prefix


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


def node_page(group: LayerGroup, path: Sequence[Node], at: int, end: int) -> NodePage | None:
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
    group: LayerGroup, window: Window, path: Sequence[Node], num_tokens: int
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
