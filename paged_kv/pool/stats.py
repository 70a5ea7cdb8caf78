"""Statistics of a pool: counts of what it did, and snapshots of what it holds.

Each number is one field here or in `paged_kv.allocator.allocator_stats`, which says how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from paged_kv.allocator.allocator_stats import (
    AllocatorStats,
    FormatStats,
    Unit,
    columns_of,
    counted,
    counter,
    number,
    sum_counts,
)
from paged_kv.checks import format_size

_NO_LAYERS = counted(AllocatorStats())


@dataclass(frozen=True, kw_only=True)
class GroupStats(AllocatorStats):
    """A snapshot of the layers that share one block table.

    Attributes:
        formats: the blocks of each page format.
        layers: number of layers.
        window: tokens that they see; None for all.
    """

    layers: int = 0
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class PoolStats(AllocatorStats):
    """A snapshot of a pool. Every byte of `bytes_mapped` is explained in
    `paged_kv.allocator.allocator_stats`. `bytes_held` is what MLX holds for the pool
    (`mx.get_active_memory`), as long as MLX hands out no larger memory that it has kept
    (`mx.set_cache_limit`), and kernels' arguments aside, some KB on a GPU.

    Blocks are evicted for these reasons: "out_of_window", memory was needed, and blocks that a
    window has passed go first; "room", memory was needed; "exhausted", memory was needed and
    nothing else was left to try; "limit", there were more prompts or bytes than the caller allows;
    "clear" was called; "forgotten", a prompt was forgotten, or a session ended.

    Attributes:
        page_format: the page format of full pages.
        backend: the kernels that write and read pages.
        groups: the layers without a window, and those of each window, once they were written.
    """

    page_format: str
    backend: str
    groups: tuple[GroupStats, ...] = ()
    # fmt: off
    bytes_beside: int = number(
        "steps that no page holds yet, states of recurrent layers, alignment",
        "+ beside slabs", "kv_beside_bytes", Unit.HELD_BYTES,
        of=lambda stats: stats.bytes_steps + stats.bytes_states + stats.bytes_scratch)
    bytes_held: int = number(
        "what MLX holds for the pool", "= held", "kv_held_bytes", Unit.HELD_BYTES,
        of=lambda stats: stats.bytes_mapped + stats.bytes_beside)
    bytes_steps: int = number(
        "keys and values of steps that no page holds yet",
        "unwritten steps", "kv_step_bytes", Unit.BYTES)
    bytes_states: int = number(
        "states of recurrent layers that the prefix cache keeps",
        "states", "kv_state_bytes", Unit.BYTES)
    bytes_scratch: int = number(
        "what alignment adds to slabs, and arrays that kernels keep",
        "scratch", "kv_scratch_bytes", Unit.BYTES)
    bytes_budget: int = number(
        "the most bytes that may be mapped", "budget", "kv_budget_bytes", Unit.BYTES)
    usage: float = number(
        "share of the budget that used pages take, 0 to 1",
        "usage", "kv_cache_usage_perc", Unit.SHARE,
        of=lambda stats: stats.bytes_active / (stats.bytes_budget or 1))
    pages_pinned: int = number(
        "pages' worth of cached tokens that are pinned", "pinned", "kv_pinned_pages")
    prefix_queries: int = counter(
        "tokens of prompts that were looked up", "tokens looked up", "prefix_cache_queries")
    prefix_hits: int = counter(
        "tokens of prompts that were found", "tokens found", "prefix_cache_hits")
    prefix_hit_rate: float = number(
        "share of looked up tokens that were found, 0 to 1", "hit rate", unit=Unit.SHARE,
        of=lambda stats: stats.prefix_hits / (stats.prefix_queries or 1))
    preemptions: int = counter(
        "times a sequence of a batch lost its pages, to return later",
        "preempted", "num_preemptions")
    tokens_recomputed: int = counter(
        "tokens of preempted sequences that were computed again",
        "tokens computed again", "tokens_recomputed")
    tokens_reread: int = counter(
        "tokens of preempted sequences that were read again from a store",
        "tokens read again", "tokens_reread")
    tokens_read: int = counter(
        "tokens of prompts that were read from a store", "tokens read", "tokens_read")
    store_hits: Mapping[str, int] = counter(
        "tokens of prompts that were read, by tier of the store",
        "tokens from tiers", "store_hit_tokens", by="tier")
    store_bytes_read: Mapping[str, int] = counter(
        "bytes of pages read, by tier of the store",
        "read", "store_read_bytes", Unit.BYTES, by="tier")
    store_bytes_today: Mapping[str, int] = number(
        "bytes written since midnight UTC, by tier of the store; to a folder by all processes",
        "written today", "store_written_bytes_today", Unit.BYTES, by="tier")
    store_bytes_in_all: Mapping[str, int] = counter(
        "bytes written so far, by tier of the store; to a folder by all processes",
        "written in all", "store_written_bytes", Unit.BYTES, by="tier")
    drafts: int = counter(
        "steps of sequences in which tokens were drafted", "drafts", "spec_decode_num_drafts")
    draft_tokens: int = counter(
        "drafted tokens", "tokens drafted", "spec_decode_num_draft_tokens")
    accepted_tokens: int = counter(
        "drafted tokens that the model accepted",
        "drafts accepted", "spec_decode_num_accepted_tokens")
    tokens_chosen: int = counter(
        "tokens that steps read which may not read all of a sequence's",
        "tokens chosen", "tokens_chosen")
    tokens_left_out: int = counter(
        "tokens that these steps did not read", "left out", "tokens_left_out")
    pages_fetched: int = counter(
        "pages of a layer that were read from the folder of offloaded pages",
        "pages fetched", "offload_pages_fetched")
    pages_late: int = counter(
        "pages of a layer that a step left out because they had not come",
        "pages late", "offload_pages_late")
    bytes_offloaded: int = number(
        "contents of pages in the folder of offloaded pages",
        "offloaded", "offload_bytes", Unit.BYTES)
    evictions: Mapping[str, int] = counter(
        "blocks' worth of cached tokens that were evicted, by reason",
        "evicted", "evictions", by="reason")
    requantisations: Mapping[str, int] = counter(
        "blocks made smaller because memory was short, by new format",
        "requantised", "requantisations", by="format")
    kernel_fallbacks: int = counter(
        "calls that no kernel could take, besides those of layers without kernels",
        "calls without a kernel", "kernel_fallbacks")
    # fmt: on

    def __post_init__(self) -> None:
        for name, nothing in _NO_LAYERS.items():
            parts = [getattr(group, name) for group in self.groups]
            object.__setattr__(self, name, sum(parts, nothing))
        super().__post_init__()

    def __str__(self) -> str:
        """The table of held bytes, for `print`."""
        head = f"{self.page_format} pages, {self.backend}, {format_size(self.bytes_budget)} allowed"
        rows = ["{:<16}{:>12}{:>8}  {}".format(*row) for row in byte_rows(self)]
        return "\n".join([head, *rows])

    def __add__(self, other: PoolStats) -> PoolStats:
        """The sum of two pools under one budget."""
        mine, others = counted(self), counted(other)
        sums = {name: _sum(mine[name], others[name]) for name in mine.keys() - _OF_BOTH}
        return PoolStats(**(mine | sums))

    def as_dict(self) -> dict[str, Any]:
        """A dictionary for JSON, with the sums of all groups."""
        names = [each.name for each in fields(self) if each.name != "formats"]
        groups = [
            {**counted(group), "formats": [each._asdict() for each in group.formats]}
            for group in self.groups
        ]
        return {**{name: getattr(self, name) for name in names}, "groups": groups}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PoolStats:
        """The snapshot from its dictionary.

        Raises:
            ValueError: it is none; the message says what is missing or too much.
        """
        known = {each.name for each in fields(cls) if each.init}
        try:
            groups = [
                {**group, "formats": tuple([FormatStats(**each) for each in group["formats"]])}
                for group in content.get("groups", [])
            ]
            own = {name: value for name, value in content.items() if name in known}
            return cls(**{**own, "groups": tuple([GroupStats(**group) for group in groups])})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is not a snapshot of this version: {error}") from None


COLUMNS = columns_of(PoolStats)
# What two pools under one budget have in common.
_OF_BOTH = {"page_format", "backend", "bytes_budget"}


def byte_rows(stats: PoolStats) -> list[tuple[str, str, str, str]]:
    """Every held byte: label, size, share of all held bytes, and meaning."""
    sizes = {
        each: int(getattr(stats, each.name)) for each in COLUMNS if each.unit is Unit.HELD_BYTES
    }
    return [
        (str(each.label), format_size(n), f"{n / (stats.bytes_held or 1):.1%}", each.meaning)
        for each, n in sizes.items()
    ]


@dataclass(frozen=True)
class Compaction:
    """The result of `PagePool.compact()`.

    Attributes:
        blocks_moved: blocks whose pages were copied.
        slabs_freed: slabs that were unmapped.
        bytes_freed: their bytes.
    """

    blocks_moved: int
    slabs_freed: int
    bytes_freed: int


def _sum(one: Any, other: Any) -> Any:
    return sum_counts([one, other]) if isinstance(one, Mapping) else one + other


class PoolCounts(SimpleNamespace):
    """What a pool has done so far: every number of `PoolStats` that only goes up and that no group
    of layers counts, by its name. `of_store` returns the counts of a store, by name and tier."""

    def __init__(self) -> None:
        of_groups = {each.name for each in fields(AllocatorStats)}
        self._columns = [each for each in COLUMNS if each.is_counter and each.name not in of_groups]
        super().__init__(**{each.name: Counter() if each.by else 0 for each in self._columns})
        self.of_store: Callable[[], Mapping[str, Mapping[str, int]]] = dict

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count a step of one sequence; one without drafted tokens does not count."""
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def frozen(self) -> dict[str, Any]:
        """A copy of the counts, by name."""
        counts = {each.name: getattr(self, each.name) for each in self._columns}
        copies = {name: dict(n) if isinstance(n, Counter) else n for name, n in counts.items()}
        return {**copies, **self.of_store()}
