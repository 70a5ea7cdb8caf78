"""The memory of all sequences of one model: slabs, and the blocks handed out of them."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Mapping, Set
from functools import partial

import mlx.core as mx

from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefix_index import PrefixIndex
from paged_kv.allocator.retired_blocks import RetiredBlocks
from paged_kv.checks import whole_number
from paged_kv.chosen_formats import FormatChoice, chosen_formats
from paged_kv.kernels.backend import choose_backend
from paged_kv.kernels.errors import ThreadConflict
from paged_kv.kernels.layer_geometry import LayerGeometry
from paged_kv.kernels.layer_pages import LayerPages
from paged_kv.kernels.page_format import PAGE_SIZE, PageFormat, page_format_named
from paged_kv.layer_group import LayerGroup, new_groups
from paged_kv.locked import locked
from paged_kv.open_pools import note_open
from paged_kv.paged_array import PagedKeys, PagedValues, gathered_arrays
from paged_kv.passed_pages import write_pending
from paged_kv.pending_step import pending_tail
from paged_kv.pool_arguments import checked_windows, chosen_budget
from paged_kv.pool_counts import PoolCounts
from paged_kv.pool_room import PoolRoom
from paged_kv.rehearsal import would_fit
from paged_kv.sequence import Sequence
from paged_kv.stats import Compaction, PoolStats
from paged_kv.step import Step
from paged_kv.step_blocks import needs_of, own, own_by_page, unreserved
from paged_kv.step_row import StepRow, layers_as_far
from paged_kv.trace import events_of
from paged_kv.window import Window

logger = logging.getLogger("paged_kv")

_serials = itertools.count()


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
        trace: a file in which to record what happens to blocks, see `paged_kv.trace`. None means
            the one that PAGED_KV_TRACE names, if it does.
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
        self.page_format, self.demotion_policy = chosen_formats(page_format)
        self.budget = chosen_budget(max_bytes, beside)
        self.backend = choose_backend()
        self.lock = self.budget.lock
        self.counts = PoolCounts(events_of(self, trace))
        self.groups = new_groups(
            num_layers,
            self.windows,
            self.page_format,
            self.demotion_policy,
            self.backend,
            self.budget,
            self.counts.events,
        )
        self.index = PrefixIndex(PAGE_SIZE, self.lock)
        self.retired = RetiredBlocks()
        self.room = PoolRoom(
            self.groups, self.budget, self.index, self.retired, self.demotion_policy, self.counts
        )
        self.attending: frozenset[int] = frozenset()
        self.attends_in_order = False
        self._group_of = {layer: group for group in self.groups for layer in group.layers}
        note_open(self)
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
        return self.room.slack()

    def group_of(self, layer: int) -> LayerGroup:
        """The group that a layer belongs to."""
        return self._group_of[layer]

    @locked
    def append(
        self, layer: int, sequences: list[Sequence], keys: mx.array, values: mx.array
    ) -> tuple[PagedKeys, PagedValues]:
        """Write S new tokens of each sequence into its pages, in one layer, padding left out;
        returns what `read` does.

        keys [B, k_heads, S, k_dim], values [B, v_heads, S, v_dim], B the number of sequences.

        Raises:
            ValueError: shapes or dtypes are not what this layer holds, or a format can hold.
            PoolExhausted: the budget does not hold the blocks.
            ThreadConflict: another thread still has to compute what it read from these pages.
                After all three, what other layers wrote in the same step is undone too.
        """
        if keys.shape[0] != len(sequences):
            raise ValueError(
                f"layer {layer} holds {len(sequences)} sequences, got a batch of {keys.shape[0]}"
            )
        if keys.shape[2] == 0:
            return self.read(layer, sequences)
        return self.begin_step(layer, sequences, keys.shape[2]).write(layer, keys, values)

    @locked
    def begin_step(self, layer: int, sequences: list[Sequence], count: int) -> Step:
        """The next `count` tokens of each sequence, padding included, for one layer and all others
        that are as far. Another step that one of them takes part in is closed."""
        layers = layers_as_far(sequences, layer, self.num_layers)
        rows = [StepRow.next(sequence, layer, count) for sequence in sequences]
        return Step(self, rows, count, layers)

    @locked
    def reserve(self, layer: int, sequences: list[Sequence], count: int) -> None:
        """Own blocks in all groups for the next `count` tokens of each sequence.

        Writing does so by itself. A model that is asked for masks first can be stopped here,
        before any of its layers has changed anything.

        Raises:
            PoolExhausted: the budget does not hold the blocks; no sequence has changed.
        """
        writes = unreserved(self.groups, self.retired, layer, sequences, count)
        if self.demotion_policy is None or self.room.has(needs_of(writes)):
            own(self.room, writes)
            return
        try:
            own_by_page(self.room, writes)
        except (PoolExhausted, ThreadConflict):
            for sequence in sequences:
                sequence.shrink()
            raise

    @locked
    def read(self, layer: int, sequences: list[Sequence]) -> tuple[PagedKeys, PagedValues]:
        """All keys and values of the sequences in one layer.

        Raises:
            ValueError: the layer was not written yet.
        """
        if layer not in self.group_of(layer).pages:
            raise ValueError(f"layer {layer} has no keys and values yet: nothing was written")
        step = sequences[0].step() if sequences else None
        has_taken = step is not None and layer in step.layers - step.waiting
        if step is None or not has_taken or step.sequences != sequences:
            if pending_tail(layer, sequences) is None:
                self.commit(sequences, {layer})
            rows = [StepRow.latest(sequence, layer) for sequence in sequences]
            step = Step(self, rows, 0, {layer})
        return gathered_arrays(step.read(layer))

    @locked
    def commit(self, sequences: list[Sequence], layers: Set[int] | None = None) -> None:
        """Write what the sequences' layers, or some of them, have not written yet. No step that
        these have taken can be attended to any more."""
        for sequence in sequences:
            if sequence.pending:
                sequence.close_step()
        self.write_pending(sequences, layers)

    @locked
    def write_pending(self, sequences: list[Sequence], layers: Set[int] | None) -> None:
        """As `commit`, before a step that the layers are about to take."""
        for sequence in sequences:
            pending = sequence.pending
            for layer in [each for each in pending if layers is None or each in layers]:
                write_pending(self.group_of(layer), layer, sequence, pending[layer])
                del pending[layer]
                sequence.step_lens[layer] = 0

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
        self.room.make(lambda: {group: Counter(formats)})
        table.append(formats)

    @locked
    def convert(self, sequences: list[Sequence], page_format: PageFormat) -> None:
        """Turn all pages of the sequences into pages of that format; tokens to come get such
        pages too. Pages that other sequences share stay for them as they are.

        O(1) for a sequence that was converted before. The pages of one slab at a time are held
        twice.

        Raises:
            ValueError: the format cannot hold what a layer writes; nothing was changed.
            PoolExhausted: the budget does not hold the new pages of a slab beside the old ones.
                What was converted stays so, new pages are of the format too, and asking again goes
                on.
        """
        others = [each for each in sequences if not each.is_held_in(page_format)]
        if not others:
            return
        open_groups = [group for group in self.groups if group.is_open]
        for group in open_groups:
            group.add_format(page_format)
        self.commit(others)
        for sequence in others:
            sequence.begin_conversion(page_format)
        for group in open_groups:
            tables = [sequence.table(group) for sequence in others]
            group.convert(tables, page_format, partial(self._make_room, group, page_format.name))
        for sequence in others:
            sequence.is_converting = False

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
        if self.room.fits(needs):
            return True
        if self.demotion_policy is None or not self.room.may_fit(needs):
            return False
        return would_fit(
            open_groups,
            self.budget,
            self.room.evictable,
            self.demotion_policy,
            self.page_format,
            tokens,
        )

    @locked
    def compact(self) -> Compaction:
        """Move pages out of the emptiest slabs and give those back; returns what that did.
        `stats().bytes_compactable` says beforehand what it would give back.

        Call it between steps: it waits for what is in flight, and copies each moved page once.
        """
        return self.room.compact()

    @locked
    def clear(self) -> int:
        """Forget the prefixes that are not pinned, and give back every slab that holds no used
        block; returns how many."""
        evicted = self.index.clear()
        self.counts.evictions["clear"] += evicted + self.retired.give_up(lambda: False)
        return self.room.give_back()

    @locked
    def check(self) -> None:
        """Verify every invariant; an AssertionError names the one that is broken."""
        for group in self.groups:
            if group.is_open:
                group.allocator.check()

    @locked
    def stats(self) -> PoolStats:
        """A snapshot of what the pool holds. O(slabs)."""
        self.room.drain()
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

    def _make_room(self, group: LayerGroup, page_format: str, count: int) -> None:
        self.room.make(lambda: {group: {page_format: count}})

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
