"""Reserves blocks for writes before any layer writes."""

from __future__ import annotations

from collections.abc import Mapping

from paged_kv.allocator.writes import Write, blocks_needed, reserve_all
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.reclaimer import Reclaimer

Writes = Mapping[LayerGroup, list[Write]]


def needs_of(writes: Writes) -> dict[LayerGroup, Mapping[str, int]]:
    """Blocks to allocate in each group, by page format."""
    return {group: blocks_needed(theirs) for group, theirs in writes.items()}


def reserve_together(reclaimer: Reclaimer, writes: Writes) -> None:
    """Reserve blocks for all writes, and copy shared pages before a table refers to the copies.

    Raises:
        PoolExhausted: the budget does not hold them; no table has changed.
        BaseException: what copying raises, such as a `ThreadConflict`; no table has changed.
    """
    if not all(each.is_owned for theirs in writes.values() for each in theirs):
        reclaimer.make_room(lambda: needs_of(writes))
    reserve_all([(theirs, group.copy_pages) for group, theirs in writes.items()])


def reserve_by_page(reclaimer: Reclaimer, writes: Writes) -> None:
    """Reserve blocks for all writes a page at a time, so that the first pages of a step can be
    requantised for its last ones.

    Raises:
        PoolExhausted: the budget does not hold them all; tables may have reserved the first.
    """
    by_page = {group: [write.by_page() for write in theirs] for group, theirs in writes.items()}
    rounds = max([len(pages) for theirs in by_page.values() for pages in theirs], default=0)
    for at in range(rounds):
        reserve_together(
            reclaimer,
            {
                group: [pages[at] for pages in theirs if at < len(pages)]
                for group, theirs in by_page.items()
            },
        )
