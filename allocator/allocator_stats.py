"""Memory statistics: frozen snapshots, each number of which is defined in one place.

A number is a field that `number` declares: with its meaning, its label in tables, its name in
Prometheus and its unit. Whatever shows statistics is made from these declarations. A number with
`of` is computed from others when a snapshot is made; the others are counted.

Every byte of a slab is in exactly one of these, for each page format:

    mapped  = active + retained + spare + fragmented
    active  = allocated + last block + out of window

    allocated        slots of live tokens
    last block       unwritten slots after a sequence's last token: last-block fragmentation
    out of window    slots whose tokens the window has passed, until they are overwritten
    retained         cached blocks: no sequence holds them, but the prefix index or
                     `OutOfWindowBlocks` keeps them for prompts with the same prefix
    spare            free blocks of empty slabs, which can be unmapped
    fragmented       free blocks of partly used slabs: external fragmentation
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

# Any of the classes of snapshots.
Stats = Any


class Unit(StrEnum):
    """The unit of a number. Every held byte is in one of HELD_BYTES, which have a table of their
    own; all other numbers come after it. SHARE is from 0 to 1."""

    HELD_BYTES = "held bytes"
    BYTES = "bytes"
    COUNT = "count"
    SHARE = "share"
    FACTOR = "factor"


@dataclass(frozen=True)
class Column:
    """What is known of one number of a snapshot, or of the numbers of its parts."""

    name: str  # of the field, and in JSON
    meaning: str  # one line of help
    label: str | None  # in tables; None if the table of blocks has it, by group of layers
    metric: str | None  # in Prometheus, after "paged_kv:"; None if other metrics give it
    unit: Unit
    by: str | None  # what its parts are, such as "reason", if it is a dictionary of counts
    is_counter: bool  # whether it only goes up
    of: Callable[[Stats], Any] | None  # computes it from the others; None if it is counted

    def parts(self, stats: Stats) -> dict[tuple[str, ...], float]:
        """The numbers by part; the only one has no part's name."""
        value = getattr(stats, self.name)
        return {(part,): n for part, n in value.items()} if self.by else {(): value}


def number(
    meaning: str,
    label: str | None = None,
    metric: str | None = None,
    unit: Unit = Unit.COUNT,
    *,
    by: str | None = None,
    is_counter: bool = False,
    of: Callable[[Stats], Any] | None = None,
) -> Any:
    """A field of a snapshot: see `Column`. One that is counted is 0, or empty, by default."""
    column = Column("", meaning, label, metric, unit, by, is_counter, of)
    if of is not None:
        return field(init=False, repr=False, compare=False, metadata={"column": column})
    default: dict[str, Any] = {"default_factory": dict} if by else {"default": 0}
    return field(**default, metadata={"column": column})


def counter(
    meaning: str, label: str, metric: str, unit: Unit = Unit.COUNT, *, by: str | None = None
) -> Any:
    return number(meaning, label, metric, unit, by=by, is_counter=True)


def in_formats(of: Callable[[FormatStats], int], meaning: str, *shown: Any) -> Any:
    """A number that is the sum over all page formats. `shown`: label, metric and unit."""
    return number(meaning, *shown, of=lambda stats: sum(map(of, stats.formats)))


def by_format(of: Callable[[FormatStats], int], meaning: str) -> Any:
    """A number for each page format."""

    def sums(stats: Stats) -> dict[str, int]:
        return sum_counts({each.page_format: of(each)} for each in stats.formats)

    return number(meaning, by="format", of=sums)


def sum_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counts of the same things."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


@cache
def columns_of(kind: Any) -> tuple[Column, ...]:
    """The numbers of a class of snapshots, in the order in which tables have them."""
    of_field = {each.name: each.metadata.get("column") for each in fields(kind)}
    return tuple([replace(column, name=name) for name, column in of_field.items() if column])


def counted(stats: AllocatorStats) -> dict[str, Any]:
    """The fields of a snapshot from which it is made; `number` computes the others from these."""
    return {each.name: getattr(stats, each.name) for each in fields(stats) if each.init}


class FormatStats(NamedTuple):
    """The blocks of one page format. Counts are blocks unless a name says bytes or slots."""

    page_format: str
    block_bytes: int  # the pages of all layers of the group together
    page_size: int  # slots of a block
    slabs: int  # mapped ones
    used: int  # by a sequence
    cached: int  # kept for later prompts; no sequence holds them
    spare: int  # free blocks of empty slabs
    fragmented: int  # free blocks of partly used slabs
    last_block_slots: int  # of used blocks, after the last token of all sequences that hold them
    out_of_window_slots: int  # of used blocks, that every window has passed
    compactable: int  # of the slabs that `compact()` would unmap

    @property
    def free(self) -> int:
        """Blocks of mapped slabs that are neither used nor cached."""
        return self.spare + self.fragmented

    def bytes_of(self, slots: int) -> int:
        return slots * self.block_bytes // self.page_size


@dataclass(frozen=True, kw_only=True)
class AllocatorStats:
    """A snapshot of an allocator, or of several, and of the layers that use it."""

    formats: tuple[FormatStats, ...] = ()
    # fmt: off
    bytes_allocated: int = in_formats(
        lambda each: each.used * each.block_bytes
        - each.bytes_of(each.last_block_slots) - each.bytes_of(each.out_of_window_slots),
        "slots of live tokens", "allocated", "kv_allocated_bytes", Unit.HELD_BYTES)
    bytes_last_block: int = in_formats(
        lambda each: each.bytes_of(each.last_block_slots),
        "free slots after the last token of a sequence",
        "+ last block", "kv_last_block_bytes", Unit.HELD_BYTES)
    bytes_out_of_window: int = in_formats(
        lambda each: each.bytes_of(each.out_of_window_slots),
        "slots that a window has left",
        "+ out of window", "kv_out_of_window_bytes", Unit.HELD_BYTES)
    bytes_active: int = in_formats(
        lambda each: each.used * each.block_bytes, "pages that sequences hold",
        "= used", "kv_active_bytes", Unit.HELD_BYTES)
    bytes_retained: int = in_formats(
        lambda each: each.cached * each.block_bytes,
        "pages that only the prefix cache holds, evicted for others",
        "+ cached", "kv_retained_bytes", Unit.HELD_BYTES)
    bytes_fragmented: int = in_formats(
        lambda each: each.fragmented * each.block_bytes,
        "free pages of slabs that hold something",
        "+ fragmented", "kv_fragmented_bytes", Unit.HELD_BYTES)
    bytes_spare: int = in_formats(
        lambda each: each.spare * each.block_bytes, "slabs that hold nothing",
        "+ spare", "kv_spare_bytes", Unit.HELD_BYTES)
    bytes_mapped: int = number(
        "all slabs", "= mapped", "kv_mapped_bytes", Unit.HELD_BYTES,
        of=lambda stats: stats.bytes_active + stats.bytes_retained
        + stats.bytes_fragmented + stats.bytes_spare)
    internal_fragmentation: float = number(
        "share of active bytes that hold no live token, 0 to 1",
        "internal fragmentation", unit=Unit.SHARE,
        of=lambda stats: 1 - _ratio(stats.bytes_allocated, stats.bytes_active))
    external_fragmentation: float = number(
        "share of mapped bytes that are neither used nor cached, 0 to 1",
        "external fragmentation", unit=Unit.SHARE,
        of=lambda stats: 1 - _ratio(stats.bytes_active + stats.bytes_retained, stats.bytes_mapped))
    bytes_compactable: int = in_formats(
        lambda each: each.compactable * each.block_bytes, "bytes that compact() would give back",
        "compact() would free", "kv_compactable_bytes", Unit.BYTES)
    slabs: int = in_formats(
        lambda each: each.slabs, "slabs mapped, each in every layer of its group", "slabs")
    blocks_used: int = in_formats(
        lambda each: each.used, "blocks that a sequence holds", "blocks used")
    blocks_cached: int = in_formats(
        lambda each: each.cached,
        "blocks that only the prefix cache holds, evicted when memory is short", "cached")
    blocks_free: int = in_formats(
        lambda each: each.free, "blocks of mapped slabs that nobody holds", "free")
    blocks_by_format: Mapping[str, int] = by_format(
        lambda each: each.used, "used blocks by page format")
    cached_by_format: Mapping[str, int] = by_format(
        lambda each: each.cached, "cached blocks by page format")
    free_by_format: Mapping[str, int] = by_format(
        lambda each: each.free, "free blocks by page format")
    blocks_shared: int = number("blocks that several sequences hold", "shared")
    tables: int = number(
        "block tables, one a sequence and group", "block tables", "kv_block_tables")
    tables_dropped: int = number(
        "block tables that were dropped: the next call frees their blocks", "dropped tables")
    table_entries: int = number("entries of all block tables", "table entries")
    sharing_factor: float = number(
        "table entries for each used block; 1 if nothing is shared",
        "sharing factor", "kv_sharing_factor", Unit.FACTOR,
        of=lambda stats: _ratio(stats.table_entries, stats.blocks_used))
    cow_copies: int = counter(
        "blocks copied because a shared one was written", "copied on write", "cow_copies")
    allocation_failures: int = counter(
        "times the pool was exhausted", "exhausted", "allocation_failures")
    bytes_metadata: int = number(
        "about how many bytes the bookkeeping takes in Python's memory, outside slabs",
        "metadata", "kv_metadata_bytes", Unit.BYTES)
    gather_fallbacks: int = counter(
        "times keys and values were gathered for attention that does not read pages",
        "gathers", "gather_fallbacks")
    plain_layers: int = number(
        "layers that no kernel of the backend takes, so that MLX's own operations serve them",
        "layers without kernels")
    # fmt: on

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for column in columns_of(kind):
            if column.of is not None:
                object.__setattr__(self, column.name, column.of(self))


def _ratio(part: int, whole: int) -> float:
    # Nothing mapped wastes nothing.
    return part / whole if whole else 1.0
