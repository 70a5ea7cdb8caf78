"""Manages the memory of all sequences of one model: slabs, and the blocks in them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol, Unpack
from weakref import WeakSet

import mlx.core as mx

from paged_kv import new_pool_listeners
from paged_kv.admission.pool_size import PoolSize
from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget, locked
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.prefix_node import OutOfWindowBlocks
from paged_kv.checks import counted, described, format_size, whole_number
from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.memory import return_to_system
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry, page_format_named
from paged_kv.offload.offloading import OFFLOADED, Offloading, OldestOffloaded
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.layer_kinds import AppendedRows, Window, checked_windows
from paged_kv.pool.options import (
    POOL_OPTIONS,
    PoolKeywords,
    PoolOptions,
    chosen_bytes,
    chosen_formats,
)
from paged_kv.pool.reclaimer import Reclaimer
from paged_kv.pool.stats import Compaction, PoolCounts, PoolStats
from paged_kv.ranks import ALONE, Ranks

logger = logging.getLogger("paged_kv")

_serials = itertools.count()


class HasUnwritten(Protocol):
    """Arrays of a step that no page holds yet: keys and values, or what rows are made of."""

    @property
    def step(self) -> tuple[mx.array, ...]: ...


class Versions(Protocol):
    """The versions of the model that computes a pool's pages: the number of the present one, and
    what a version is, the same in every process; None if that is not known."""

    @property
    def number(self) -> int: ...

    def identity(self, number: int) -> tuple[str, str] | None: ...


class Sized(Protocol):
    """Arrays beside pages."""

    @property
    def nbytes(self) -> int: ...


class States(Sized, Protocol):
    """The states that a prefix cache keeps. `remember` counts states that sequences hold, as long
    as they exist; false if there is no room."""

    def remember(self, states: Sized) -> bool: ...


class _OpenPools:
    """The pools that are still referenced elsewhere. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._pools: WeakSet[PagePool] = WeakSet()
        self._lock = threading.Lock()

    def add(self, pool: PagePool) -> None:
        with self._lock:
            self._pools.add(pool)
            for listener in new_pool_listeners:
                listener()

    def items(self) -> list[PagePool]:
        with self._lock:
            return list(self._pools)


open_pools = _OpenPools()
"""The pools in use, weakly referenced."""


class PagePool:
    """Pages for `num_layers` layers under one byte budget.

    Args:
        num_layers: number of layers that keep keys and values.
        options: how it keeps pages.
        windows: the windows of layers with a sliding window, by layer.
        rows: what layers hold that append rows and no keys and values, by layer.
        beside: another pool, whose budget this one shares.
        name: its name in log messages.
        keywords: options that differ from `options`.

    Attributes:
        read_tokens: see above; None if all tokens are read.
        requantisation_policy: that of `page_format`, if it is one.
        reclaiming_policy: the same, or the one that takes pages out of memory.
        offloading: the pages that are out of memory, if any may be.
        counts: counts of evictions, requantisations and look-ups.
        attending: layers whose keys and values only attention uses, as far as is known.
        attending_in_decode: the same for steps of one token.
        is_reproducible: whether the bits of a sequence may depend on nothing but its own tokens:
            then prompts resume only behind full pages, and find only what prompts have computed.
        attends_in_order: whether each layer's attention runs before the next layer writes.
        ranks: the processes that compute the pool's model together.
        versions: those of its model; None if it is not known.
        hooks: what new sequences keep replaced in the model's modules; None for a model's own code.
        unwritten: the steps that rings have not written yet.
        snapshots: the states that prefix caches keep.

    Raises:
        TypeError, ValueError, OSError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        num_layers: int,
        options: PoolOptions = POOL_OPTIONS,
        *,
        windows: Mapping[int, Window] | None = None,
        rows: Mapping[int, AppendedRows] | None = None,
        beside: PagePool | None = None,
        name: str = "pool",
        **keywords: Unpack[PoolKeywords],
    ) -> None:
        options = replace(options, **keywords)
        self.num_layers = whole_number("num_layers", num_layers, least=0)
        self.windows = checked_windows(windows, num_layers)
        self.rows = dict(rows or {})
        self.name = name
        self.serial = next(_serials)
        self.page_format, self.requantisation_policy = chosen_formats(options.page_format)
        if self.rows and self.quantises:
            names = ", ".join(dict.fromkeys(each.name for each in self.rows.values()))
            raise ValueError(
                f'page_format must be "fp16" for {name}: its layers append rows ({names}), which '
                f"keep 16 bits, got {described(options.page_format)}"
            )
        self.eviction_policy = options.eviction_policy
        if beside is None:
            self.budget = ByteBudget(chosen_bytes(options.max_bytes))
        else:
            require_pool("beside", beside)
            if options.max_bytes is not None:
                raise ValueError(
                    "a pool `beside` another shares its max_bytes: give one of the two"
                )
            self.budget = beside.budget
        self.backend = options.backend or choose_backend()
        self.read_tokens = None if self.rows else options.read_tokens
        self.offloading = self._new_offloading(options)
        self.reclaiming_policy = self.requantisation_policy
        if self.offloading is not None:
            self.reclaiming_policy = OldestOffloaded(self.page_format.name)
        self.lock = self.budget.lock
        self.counts = PoolCounts()
        named = self.requantisation_policy.page_formats if self.requantisation_policy else ()
        smaller = (OFFLOADED,) if self.offloading else tuple(map(page_format_named, named))
        members: dict[Window | None, list[int]] = {}
        for layer in range(num_layers):
            members.setdefault(self.windows.get(layer), []).append(layer)
        of_window = partial(LayerGroup, backend=self.backend, budget=self.budget)
        of_all = partial(
            of_window,
            page_format=self.page_format,
            smaller_formats=smaller,
            read_tokens=self.read_tokens,
            offloading=self.offloading,
        )
        self.groups = [
            (of_window if window else of_all)(layers, window) for window, layers in members.items()
        ]
        self.index = PrefixIndex(PAGE_SIZE, self.lock, self.eviction_policy)
        self.out_of_window = OutOfWindowBlocks(self.eviction_policy)
        caches = self.index, self.out_of_window
        self.reclaimer = Reclaimer(
            self.groups, self.budget, *caches, self.reclaiming_policy, self.counts
        )
        self.attending: frozenset[int] = frozenset()
        self.attending_in_decode: frozenset[int] = frozenset()
        self.is_reproducible = False
        self.attends_in_order = False
        self.ranks: Ranks = ALONE
        self.versions: Versions | None = None
        self.hooks: object = None
        self.unwritten: WeakSet[HasUnwritten] = WeakSet()
        self.snapshots: WeakSet[States] = WeakSet()
        self._group_of = {layer: group for group in self.groups for layer in group.layers}
        open_pools.add(self)
        logger.info("%s: up to %s of pages", name, format_size(self.budget.max_bytes))

    def __repr__(self) -> str:
        return (
            f"PagePool {self.serial} ({self.name}, {counted(self.num_layers, 'layer')}, "
            f"{self.page_format.name} pages)"
        )

    def _new_offloading(self, options: PoolOptions) -> Offloading | None:
        if options.offload is None or len(self.windows) == self.num_layers:
            return None
        if self.read_tokens is None:
            reason = "decode then reads what matters most, and only that must be in memory"
            if self.rows:
                names = ", ".join(dict.fromkeys(each.name for each in self.rows.values()))
                reason = f"the layers of {self.name} append rows ({names}), and read all"
            raise ValueError(
                f"offload needs read_tokens: {reason}. Give read_tokens, such as 8192, or leave "
                "offload out"
            )
        if self.requantisation_policy is not None:
            raise ValueError(
                "offload needs one page_format, such as 'fp16' or 'q4', since pages that are short "
                f"of memory go to the folder: got {described(options.page_format)}"
            )
        return Offloading(
            Path(options.offload), self.page_format, self.read_tokens, options.wait_for_pages
        )

    @property
    def is_open(self) -> bool:
        """Whether any layer has been written, so that block sizes are known."""
        return bool(self.reclaimer.open_groups())

    @property
    def size(self) -> PoolSize:
        """The memory that it can promise, once it knows its layers' geometry. With "auto" pages
        promises count 16 bits: requantisation makes room for cached pages, never for a promise."""
        groups = tuple([group.size for group in self.reclaimer.open_groups()])
        return PoolSize(self.budget.max_bytes, self.reclaimer.slack(self.budget), groups)

    @property
    def chooses(self) -> bool:
        """Whether steps of some layers may read less than all tokens."""
        return any(group.read_tokens is not None for group in self.groups)

    @cached_property
    def longest_rollback(self) -> int | None:
        """The most of a step's tokens that all rings can roll back; None without windows."""
        chunks = [window.write_chunk for window in self.windows.values()]
        return min(chunks) - 1 if chunks else None

    @property
    def quantises(self) -> bool:
        """Whether full pages are quantised, or may be when memory runs short."""
        return self.page_format != FP16 or self.requantisation_policy is not None

    @property
    def group_tokens(self) -> int:
        """Sequences resume after multiples of so many tokens from pages alone: no layer's group of
        tokens is open there."""
        return max((each.rate for each in self.rows.values()), default=1)

    def group_of(self, layer: int) -> LayerGroup:
        return self._group_of[layer]

    def geometry(self, layer: int) -> LayerGeometry | None:
        """The geometry of a layer, or None before its first write."""
        pages = self.group_of(layer).pages.get(layer)
        return None if pages is None else pages.geometry

    def __deepcopy__(self, memo: object) -> PagePool:
        return self  # Copies of caches share its pages.

    @locked
    def append_blocks(self, group: LayerGroup, table: BlockTable, formats: list[str]) -> None:
        """Append new blocks of these page formats to a table.

        Raises:
            ValueError: a format cannot hold a layer's keys and values; nothing was changed.
            PoolExhausted: the budget does not hold them; nothing was changed.
        """
        if not formats:
            return
        group.add_formats(*map(page_format_named, formats))
        # One by one where the first may go out of memory for the last.
        parts = [formats] if self.offloading is None else [[name] for name in formats]
        tokens = table.tokens
        try:
            for part in parts:
                self.reclaimer.make_room(partial(dict, {group: Counter(part)}))
                table.append(part)
        except BaseException:
            table.truncate(tokens)
            raise

    @locked
    def can_admit(self, tokens: int) -> bool:
        """Whether a new sequence of `tokens` tokens would fit now, if need be with requantisation.
        O(slabs), and O(pages of the sequence * used blocks) in that case.

        True before the first write, because block sizes are unknown then.

        Raises:
            TypeError, ValueError: `tokens` is no integer, or is negative.
        """
        tokens = whole_number("tokens", tokens, least=0)
        return self.reclaimer.can_admit(tokens, self.page_format)

    @locked
    def compact(self) -> Compaction:
        """Move pages out of the emptiest slabs and unmap those; returns moves, slabs and bytes.
        `stats().bytes_compactable` predicts the bytes.

        Call it between steps: it waits for pending work, and copies each moved page once.
        """
        compaction = self.reclaimer.compact()
        return_to_system()
        return compaction

    @locked
    def release_unused(self) -> None:
        """Give back at once, while no step runs, what steps give back little by little, and every
        empty slab."""
        self.reclaimer.drain()
        while self.reclaimer.tidy():
            pass
        self.reclaimer.give_back()
        return_to_system()

    @locked
    def settle(self) -> None:
        """Compute what is pending, or forget it: see `LayerPages.settle`."""
        for group in self.groups:
            for pages in group.pages.values():
                pages.settle()

    @locked
    def clear(self) -> int:
        """Evict all prefixes that are not pinned, and unmap every empty slab; returns how many."""
        evicted = self.index.forget()
        self.counts.evictions["clear"] += evicted + self.out_of_window.evict(lambda: False)
        slabs = self.reclaimer.give_back()
        return_to_system()
        return slabs

    @locked
    def check(self) -> None:
        """Verify every invariant; an AssertionError names the broken one."""
        for group in self.reclaimer.open_groups():
            group.allocator.check()

    @property
    @locked
    def bytes_active(self) -> int:
        """Bytes of the pages of used blocks, as in `stats()`. O(formats)."""
        self.reclaimer.drain()
        formats = self.reclaimer.formats()
        return sum((each.num_used - each.num_cached) * each.block_bytes for each in formats)

    @property
    @locked
    def bytes_retained(self) -> int:
        """Bytes of the pages of cached blocks, as in `stats()`. O(formats)."""
        self.reclaimer.drain()
        return sum(each.num_cached * each.block_bytes for each in self.reclaimer.formats())

    @locked
    def stats(self) -> PoolStats:
        """A snapshot. O(slabs + block tables), and O(blocks) where layers have a window: the slots
        of the tables' last blocks and rings are counted."""
        self.reclaimer.drain()
        return self.snapshot()

    @locked
    def snapshot(self) -> PoolStats:
        """As `stats`, but keeps the blocks of collected sequences; safe for observer threads."""
        pages = [pages for group in self.groups for pages in group.pages.values()]
        steps = [*(each.unwritten for each in pages), *(each.step for each in list(self.unwritten))]
        # Rows of a batch share arrays.
        bytes_of_steps = {id(array): array.nbytes for step in steps for array in step}
        numbers = {
            **self.counts.frozen(),
            **({} if self.offloading is None else self.offloading.stats()),
            "kernel_fallbacks": self.backend.fallbacks,
            "pages_pinned": self.index.holds.num_pinned,
            "bytes_budget": self.budget.max_bytes,
            "bytes_steps": sum(bytes_of_steps.values()),
            "bytes_states": sum(each.nbytes for each in list(self.snapshots)),
            "bytes_scratch": self.backend.kept_bytes + sum(each.padding_bytes for each in pages),
        }
        groups = tuple([group.stats() for group in self.reclaimer.open_groups()])
        return PoolStats(
            page_format=self.page_format.name, backend=self.backend.name, groups=groups, **numbers
        )

    def record_gather(self, group: LayerGroup, pages: LayerPages) -> None:
        """Count a gather of a layer's keys and values; log the first one."""
        if not any(each.gather_fallbacks for each in self.groups):
            (layer,) = [layer for layer, each in group.pages.items() if each is pages]
            logger.warning(
                "%s: attention of layer %d does not read pages; keys and values are gathered for "
                "it, which is correct but slower (logged once; stats() counts)",
                self.name,
                layer,
            )
        group.gather_fallbacks += 1


def require_pool(name: str, value: object) -> None:
    """Raise a TypeError with the argument's name unless the value is a PagePool."""
    if not isinstance(value, PagePool):
        raise TypeError(f"{name} must be a PagePool, got {described(value)}")
