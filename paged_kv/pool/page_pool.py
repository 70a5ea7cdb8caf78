"""The memory of all sequences of one model: slabs, and the blocks handed out of them."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Mapping

from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlocks
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.checks import described, whole_number
from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE, page_format_named
from paged_kv.pool.arguments import checked_windows, chosen_budget
from paged_kv.pool.counts import PoolCounts
from paged_kv.pool.formats import FormatChoice, chosen_formats
from paged_kv.pool.layer_group import LayerGroup, new_groups
from paged_kv.pool.locked import locked
from paged_kv.pool.reclaimer import Reclaimer
from paged_kv.pool.registry import Registry
from paged_kv.pool.rehearsal import would_fit
from paged_kv.pool.stats import Compaction, PoolStats
from paged_kv.pool.trace import events_of
from paged_kv.pool.window import Window

logger = logging.getLogger("paged_kv")

_serials = itertools.count()

open_pools: Registry[PagePool] = Registry()
"""The pools that somebody still refers to."""


class PagePool:
    """Pages for `num_layers` layers under one byte budget.

    Args:
        num_layers: layers that keep keys and values.
        windows: what the layers see that see a window only.
        page_format: how pages hold numbers: "fp16", the model's own 16 bits, "q8" or "q4"; or two
            of these, for keys and for values. With "auto", or a policy of one's own, pages begin
            with 16 bits and get smaller when memory gets short.
        max_bytes: the most that slabs may take, such as "4GB"; None means 80 % of what the machine
            recommends, less what is in use.
        beside: a pool with which this one shares its budget, instead of one of its own.
        trace: a file in which to record what happens to blocks, see `paged_kv.pool.trace`. None
            means the one that PAGED_KV_TRACE names, if it does.
        name: what log messages call the pool.

    Attributes:
        counts: what has happened in it.
        attending: layers of which only attention takes keys and values, as far as is known.
        attends_in_order: whether it does before the next layer writes.

    Raises:
        TypeError, ValueError, OSError: an argument is wrong; the message says which.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        windows: Mapping[int, Window] | None = None,
        page_format: FormatChoice = "fp16",
        max_bytes: float | str | None = None,
        beside: PagePool | None = None,
        trace: str | os.PathLike[str] | None = None,
        name: str = "pool",
    ) -> None:
        self.num_layers = whole_number("num_layers", num_layers, least=0)
        self.windows = checked_windows(windows, num_layers)
        self.name = name
        self.serial = next(_serials)
        self.page_format, self.requantisation_policy = chosen_formats(page_format)
        if beside is not None:
            require_pool("beside", beside)
        self.budget: ByteBudget = chosen_budget(max_bytes, beside.budget if beside else None)
        self.backend = choose_backend()
        self.lock = self.budget.lock
        self.counts = PoolCounts(events_of(self.budget, name, trace))
        self.groups = new_groups(
            num_layers,
            self.windows,
            self.page_format,
            self.requantisation_policy,
            self.backend,
            self.budget,
            self.counts.events,
        )
        self.index = PrefixIndex(PAGE_SIZE, self.lock)
        self.out_of_window = OutOfWindowBlocks()
        self.reclaimer = Reclaimer(
            self.groups,
            self.budget,
            self.index,
            self.out_of_window,
            self.requantisation_policy,
            self.counts,
        )
        self.attending: frozenset[int] = frozenset()
        self.attends_in_order = False
        self._group_of = {layer: group for group in self.groups for layer in group.layers}
        open_pools.add(self)
        logger.info("%s: up to %s bytes of pages", name, f"{self.budget.max_bytes:,}")

    def __repr__(self) -> str:
        return (
            f"PagePool {self.serial} ({self.name}, {self.num_layers} layers, "
            f"{self.page_format.name} pages)"
        )

    @property
    def is_open(self) -> bool:
        """Whether anything was written, so that it is known how large a block is."""
        return any(group.is_open for group in self.groups)

    @property
    def slack(self) -> int:
        """Bytes of the budget that may lie idle, because memory is mapped in slabs."""
        return self.reclaimer.slack()

    def group_of(self, layer: int) -> LayerGroup:
        """The group that a layer belongs to."""
        return self._group_of[layer]

    def geometry(self, layer: int) -> LayerGeometry | None:
        """What a layer holds, or None before its first write."""
        pages = self.group_of(layer).pages.get(layer)
        return None if pages is None else pages.geometry

    @locked
    def append_blocks(self, group: LayerGroup, table: BlockTable, formats: list[str]) -> None:
        """Own new blocks of these page formats in a table, behind those that it has.

        Raises:
            ValueError: a format cannot hold what a layer writes; nothing was changed.
            PoolExhausted: the budget does not hold them; nothing was changed.
        """
        if not formats:
            return
        for name in formats:
            group.add_format(page_format_named(name))
        self.reclaimer.make_room(lambda: {group: Counter(formats)})
        table.append(formats)

    @locked
    def can_admit(self, tokens: int) -> bool:
        """Whether a new sequence of `tokens` tokens would fit now, also if pages must become
        smaller while it is read. O(slabs), and O(pages of the sequence * used blocks) in that case.

        Before the first write it is not known how large a block is, and the answer is yes.

        Raises:
            TypeError, ValueError: `tokens` is no integer, or is negative.
        """
        tokens = whole_number("tokens", tokens, least=0)
        open_groups = [group for group in self.groups if group.is_open]
        needs = {group: {self.page_format.name: group.blocks_for(tokens)} for group in open_groups}
        if self.reclaimer.fits(needs):
            return True
        if self.requantisation_policy is None or not self.reclaimer.may_fit(needs):
            return False
        return would_fit(
            open_groups,
            self.budget,
            self.reclaimer.evictable,
            self.requantisation_policy,
            self.page_format,
            tokens,
        )

    @locked
    def compact(self) -> Compaction:
        """Move pages out of the emptiest slabs and give those back; returns what that did.
        `stats().bytes_compactable` says beforehand what it would give back.

        Call it between steps: it waits for what is in flight, and copies each moved page once.
        """
        return self.reclaimer.compact()

    @locked
    def clear(self) -> int:
        """Forget the prefixes that are not pinned, and give back every slab that holds no used
        block; returns how many."""
        evicted = self.index.clear()
        self.counts.evictions["clear"] += evicted + self.out_of_window.give_up(lambda: False)
        return self.reclaimer.give_back()

    @locked
    def check(self) -> None:
        """Verify every invariant; an AssertionError names the one that is broken."""
        for group in self.groups:
            if group.is_open:
                group.allocator.check()

    @locked
    def stats(self) -> PoolStats:
        """A snapshot of what the pool holds. O(slabs)."""
        self.reclaimer.drain()
        return self.snapshot()

    @locked
    def snapshot(self) -> PoolStats:
        """As `stats`, but nothing is released that finalisers left: for threads that only look."""
        return PoolStats(
            page_format=self.page_format.name,
            backend=self.backend.name,
            bytes_budget=self.budget.max_bytes,
            groups=tuple([group.stats() for group in self.groups if group.is_open]),
            kernel_fallbacks=self.backend.fallbacks,
            **self.counts.frozen(),
        )

    def note_gather(self, group: LayerGroup, pages: LayerPages) -> None:
        """Count that a layer's keys and values were gathered, for attention or anybody else."""
        if not any(each.gather_fallbacks for each in self.groups):
            (layer,) = [layer for layer, each in group.pages.items() if each is pages]
            logger.warning(
                "%s: attention of layer %d does not read pages; keys and values are gathered "
                "for it, which is right but slower (said once; stats() counts)",
                self.name,
                layer,
            )
        group.gather_fallbacks += 1


def require_pool(name: str, value: object) -> None:
    """Raise a TypeError unless the value is a PagePool."""
    if not isinstance(value, PagePool):
        raise TypeError(f"{name} must be a PagePool, got {described(value)}")
