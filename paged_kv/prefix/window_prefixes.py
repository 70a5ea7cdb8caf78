"""Prefix hits in groups with a window: lists the slots of a sequence's ring for the index, and
rebuilds a ring for another sequence from them."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from typing import NamedTuple

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.prefixes.prefix_node import Node, OutOfWindowBlock, WindowSlots
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.layer_kinds import Window
from paged_kv.prefix.keeping import Nodes
from paged_kv.steps.sequence import Sequence


class WindowPrefix(NamedTuple):
    """A ring from which a sequence can resume in a group with a window: its pages in the order of
    its block table, and the most tokens that such a ring was written with."""

    pages: tuple[OutOfWindowBlock, ...]
    written: int


def held_slots(
    sequence: Sequence, group: LayerGroup, num_tokens: int
) -> Iterator[tuple[int, WindowSlots]]:
    """Page numbers and slots of a sequence's first `num_tokens` tokens that a group with a window
    still holds. This caches all pages of the ring as out-of-window blocks.

    A partly overwritten page of the ring yields two entries: the slots of its present page number,
    and the slots left of its former one.
    """
    window = group.window
    assert window is not None
    for page, out_of_window in sequence.out_of_window.get(group, {}).items():
        if (page + 1) * PAGE_SIZE <= num_tokens and out_of_window.block is not None:
            yield page, WindowSlots(out_of_window, 0, PAGE_SIZE, is_end=False)
    ring, blocks = window.ring, sequence.blocks(group)
    first_held = window.first_held(sequence.layers.written(group))
    for page in range(-(-num_tokens // PAGE_SIZE)):
        first = 0 if page < ring.head else max(0, first_held - page * PAGE_SIZE)
        last = min(PAGE_SIZE, num_tokens - page * PAGE_SIZE)
        if first < last:
            out_of_window = sequence.pool.out_of_window.cache(
                group.allocator, blocks[ring.entry(page)]
            )
            yield page, WindowSlots(out_of_window, first, last, is_end=True)


def supersede_rings(
    path: Nodes,
    windows: abc.Sequence[abc.Mapping[BlockAllocator, abc.Sequence[WindowSlots]]],
    group: LayerGroup,
) -> None:
    """Let the rings go that prefixes of this one ended with, in a group with a window, but those
    behind which another prompt has parted. `windows` are the slots of its own ring by page."""
    window, allocator = group.window, group.allocator
    assert window is not None
    ring = window.ring
    own = [
        page
        for page, held in enumerate(windows)
        if page >= ring.head and any(slots.is_end for slots in held.get(allocator, ()))
    ]
    # The nearest page from here on behind which prompts part.
    parting = len(path) + ring.entries
    for page in reversed(range(ring.head, min(own, default=0))):
        if len(path[page].children) > 1:
            parting = page
        if parting - page >= ring.entries:
            path[page].demote_windows(allocator)


def window_prefix(
    nodes: Nodes, num_tokens: int, window: Window, allocator: BlockAllocator
) -> WindowPrefix | None:
    """The ring from which a sequence can resume after a prefix's first `num_tokens` tokens; None
    unless all of its pages are cached."""
    last = -(-num_tokens // PAGE_SIZE) - 1
    slots = num_tokens - last * PAGE_SIZE
    for newest in nodes[last].slots_of(allocator):
        if newest.last >= slots:
            ring = _ring_with(newest, nodes, num_tokens, window, allocator)
            if ring is not None:
                return ring
    return None


def _ring_with(
    newest: WindowSlots, nodes: Nodes, num_tokens: int, window: Window, allocator: BlockAllocator
) -> WindowPrefix | None:
    """The ring whose latest page is `newest`; None if another of its pages is missing."""
    ring, last = window.ring, -(-num_tokens // PAGE_SIZE) - 1
    oldest = max(ring.head, last - ring.entries + 1)
    pages = {}
    for page in ring.held(last):
        slots = newest if page == last else _slots_to_the_end(nodes[page], allocator)
        if slots is None:
            return None
        pages[page] = slots
    if any(slots.first and page != oldest for page, slots in pages.items()):
        return None
    first = window.head_end  # the first position after the sink tokens that the ring holds
    if last >= oldest:
        first, before = oldest * PAGE_SIZE + pages[oldest].first, last - ring.entries
        if before >= ring.head and not pages[oldest].first:
            # The latest page still holds the end of the page that it is overwriting.
            for slots in nodes[before].slots_of(allocator):
                if slots.out_of_window is newest.out_of_window and slots.last == PAGE_SIZE:
                    first = before * PAGE_SIZE + slots.first
                    break
    is_full = len(pages) == ring.size
    if first > window.head_end and not (is_full and first <= window.first_visible(num_tokens)):
        return None
    lost = first > window.head_end
    written = max(num_tokens, first + window.capacity) if lost else num_tokens
    return WindowPrefix(tuple([slots.out_of_window for slots in pages.values()]), written)


def _slots_to_the_end(node: Node, allocator: BlockAllocator) -> WindowSlots | None:
    """The longest cached run of slots that reaches the end of a full block."""
    to_the_end = [slots for slots in node.slots_of(allocator) if slots.last == PAGE_SIZE]
    return min(to_the_end, key=lambda slots: slots.first, default=None)
