"""The columns of a pool's statistics: each number is defined here once.

`PoolStats.as_dict`, Prometheus' metrics, the tables of `paged-kv stats` and the server's page are
made from these definitions. A new column is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paged_kv.sizes import format_size

Value = float | dict[str, int]
# `PoolStats`, whose module imports this one.
Stats = Any


class Unit(StrEnum):
    """The unit of a number.

    Every held byte is in one of the columns in HELD_BYTES, which have a table of their own; all
    other columns come after it. SHARE is from 0 to 1.
    """

    HELD_BYTES = "held bytes"
    BYTES = "bytes"
    COUNT = "count"
    SHARE = "share"
    FACTOR = "factor"


class Kind(StrEnum):
    """Whether a number goes up and down, or only up."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True)
class Column:
    """One number of a pool's statistics, or one for each reason or page format.

    Attributes:
        name: in JSON.
        meaning: one line of help.
        label: its label in tables. None if the table of blocks has it, by group of layers.
        metric: its name in Prometheus, after "paged_kv:". None if other metrics give it.
        unit: what it counts.
        kind: whether it only goes up.
        by: the label of its parts, if it is a dictionary of counts.
        read: computes it; None reads the attribute of `PoolStats` with its name.
    """

    name: str
    meaning: str
    label: str | None = None
    metric: str | None = None
    unit: Unit = Unit.COUNT
    kind: Kind = Kind.GAUGE
    by: str | None = None
    read: Callable[[Stats], Value] | None = None

    def of(self, stats: Stats) -> Value:
        """The number, or numbers by part, in this snapshot."""
        value = self.read(stats) if self.read else getattr(stats, self.name)
        return dict(value) if isinstance(value, Mapping) else value

    def parts(self, stats: Stats) -> dict[tuple[str, ...], float]:
        """The numbers by part; the only one has no part's name."""
        value = self.of(stats)
        return {(part,): n for part, n in value.items()} if isinstance(value, dict) else {(): value}


# In the order in which tables have them.
COLUMNS = [
    Column(
        "bytes_allocated", "slots of live tokens",
        "allocated", "kv_allocated_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_last_block", "free slots after the last token of a sequence",
        "+ last block", "kv_last_block_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_out_of_window", "slots that a window has left",
        "+ out of window", "kv_out_of_window_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_active", "pages that sequences hold",
        "= used", "kv_active_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_retained", "pages that only the prefix cache holds, evicted for others",
        "+ cached", "kv_retained_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_fragmented", "free pages of slabs that hold something",
        "+ fragmented", "kv_fragmented_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_spare", "slabs that hold nothing",
        "+ spare", "kv_spare_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_mapped", "all slabs",
        "= mapped", "kv_mapped_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_beside", "steps that no page holds yet, states of recurrent layers, alignment",
        "+ beside slabs", "kv_beside_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_held", "what MLX holds for the pool",
        "= held", "kv_held_bytes", Unit.HELD_BYTES,
    ),
    Column(
        "bytes_steps", "keys and values of steps that no page holds yet",
        "unwritten steps", "kv_step_bytes", Unit.BYTES,
    ),
    Column(
        "bytes_states", "states of recurrent layers that the prefix cache keeps",
        "states", "kv_state_bytes", Unit.BYTES,
    ),
    Column(
        "bytes_scratch", "what alignment adds to slabs, and arrays that kernels keep",
        "scratch", "kv_scratch_bytes", Unit.BYTES,
    ),
    Column(
        "bytes_budget", "the most bytes that may be mapped",
        "budget", "kv_budget_bytes", Unit.BYTES,
    ),
    Column(
        "usage", "share of the budget that used pages take, 0 to 1",
        "usage", "kv_cache_usage_perc", Unit.SHARE,
    ),
    Column(
        "bytes_compactable", "bytes that compact() would give back",
        "compact() would free", "kv_compactable_bytes", Unit.BYTES,
    ),
    Column(
        "bytes_metadata", "about how many bytes the bookkeeping takes, outside slabs",
        "metadata", "kv_metadata_bytes", Unit.BYTES,
    ),
    Column(
        "internal_fragmentation", "share of active bytes that hold no live token, 0 to 1",
        "internal fragmentation", unit=Unit.SHARE,
    ),
    Column(
        "external_fragmentation", "share of mapped bytes that are free, 0 to 1",
        "external fragmentation", unit=Unit.SHARE,
    ),
    Column("slabs", "slabs mapped, each in every layer of its group", "slabs"),
    Column("blocks_used", "blocks that a sequence holds", "blocks used"),
    Column("blocks_shared", "blocks that several sequences hold", "shared"),
    Column("blocks_cached", "blocks that only the prefix cache holds", "cached"),
    Column("blocks_free", "blocks of mapped slabs that nobody holds", "free"),
    Column("blocks_by_format", "used blocks by page format", by="format"),
    Column("cached_by_format", "cached blocks by page format", by="format"),
    Column("free_by_format", "free blocks by page format", by="format"),
    Column("tables", "block tables, one a sequence and group", "block tables", "kv_block_tables"),
    Column("tables_dropped", "block tables that the next step frees", "dropped tables"),
    Column("table_entries", "entries of all block tables", "table entries"),
    Column(
        "sharing_factor", "table entries for each used block",
        "sharing factor", "kv_sharing_factor", Unit.FACTOR,
    ),
    Column(
        "cow_copies", "blocks copied because a shared one was written",
        "copied on write", "cow_copies", kind=Kind.COUNTER,
    ),
    Column(
        "pages_pinned", "pages' worth of cached tokens that are pinned",
        "pinned", "kv_pinned_pages",
    ),
    Column(
        "prefix_queries", "tokens of prompts that were looked up",
        "tokens looked up", "prefix_cache_queries", kind=Kind.COUNTER,
    ),
    Column(
        "prefix_hits", "tokens of prompts that were found",
        "tokens found", "prefix_cache_hits", kind=Kind.COUNTER,
    ),
    Column(
        "prefix_hit_rate", "share of looked up tokens that were found, 0 to 1",
        "hit rate", unit=Unit.SHARE,
    ),
    Column(
        "preemptions", "times a sequence of a batch lost its pages, to return later",
        "preempted", "num_preemptions", kind=Kind.COUNTER,
    ),
    Column(
        "tokens_recomputed", "tokens of preempted sequences that were computed again",
        "tokens computed again", "tokens_recomputed", kind=Kind.COUNTER,
    ),
    Column(
        "tokens_reread", "tokens of preempted sequences that were read again from a store",
        "tokens read again", "tokens_reread", kind=Kind.COUNTER,
    ),
    Column(
        "tokens_read", "tokens of prompts that were read from a store",
        "tokens read", "tokens_read", kind=Kind.COUNTER,
    ),
    Column(
        "store_hits", "tokens of prompts that were read, by tier of the store",
        "tokens from tiers", "store_hit_tokens", kind=Kind.COUNTER, by="tier",
    ),
    Column(
        "store_bytes_read", "bytes read, by tier of the store",
        "read", "store_read_bytes", Unit.BYTES, kind=Kind.COUNTER, by="tier",
    ),
    Column(
        "store_bytes_today", "bytes written since midnight UTC, by tier of the store",
        "written today", "store_written_bytes_today", Unit.BYTES, by="tier",
    ),
    Column(
        "store_bytes_in_all", "bytes written so far, by tier of the store",
        "written in all", "store_written_bytes", Unit.BYTES, kind=Kind.COUNTER, by="tier",
    ),
    Column(
        "drafts", "steps of sequences in which tokens were drafted",
        "drafts", "spec_decode_num_drafts", kind=Kind.COUNTER,
    ),
    Column(
        "draft_tokens", "drafted tokens",
        "tokens drafted", "spec_decode_num_draft_tokens", kind=Kind.COUNTER,
    ),
    Column(
        "accepted_tokens", "drafted tokens that the model accepted",
        "drafts accepted", "spec_decode_num_accepted_tokens", kind=Kind.COUNTER,
    ),
    Column(
        "tokens_chosen", "tokens that steps read which may not read all of a sequence's",
        "tokens chosen", "tokens_chosen", kind=Kind.COUNTER,
    ),
    Column(
        "tokens_left_out", "tokens that these steps did not read",
        "left out", "tokens_left_out", kind=Kind.COUNTER,
    ),
    Column(
        "pages_fetched", "pages of a layer that were read from the folder of offloaded pages",
        "pages fetched", "offload_pages_fetched", kind=Kind.COUNTER,
    ),
    Column(
        "pages_late", "pages of a layer that a step left out because they had not come",
        "pages late", "offload_pages_late", kind=Kind.COUNTER,
    ),
    Column(
        "bytes_offloaded", "contents of pages in the folder of offloaded pages",
        "offloaded", "offload_bytes",
    ),
    Column(
        "evictions", "blocks' worth of cached tokens that were evicted, by reason",
        "evicted", "evictions", kind=Kind.COUNTER, by="reason",
    ),
    Column(
        "requantisations", "blocks made smaller because memory was short, by new format",
        "requantised", "requantisations", kind=Kind.COUNTER, by="format",
    ),
    Column(
        "allocation_failures", "times the pool was exhausted",
        "exhausted", "allocation_failures", kind=Kind.COUNTER,
    ),
    Column(
        "gather_fallbacks", "gathers for attention that reads no pages",
        "gathers", "gather_fallbacks", kind=Kind.COUNTER,
    ),
    Column(
        "kernel_fallbacks", "calls that no kernel could take",
        "calls without a kernel", "kernel_fallbacks", kind=Kind.COUNTER,
    ),
    Column("plain_layers", "layers that no kernel takes", "layers without kernels"),
    Column(
        "traces_stopped", "traces whose file could not be written any more",
        "traces stopped", "traces_stopped",
    ),
]  # fmt: skip


def byte_rows(stats: Stats) -> list[tuple[str, str, str, str]]:
    """Every held byte: label, size, share of all held bytes, and meaning."""
    held_bytes = [each for each in COLUMNS if each.unit is Unit.HELD_BYTES and each.label]
    return [
        (
            str(each.label),
            format_size(nbytes),
            f"{nbytes / (stats.bytes_held or 1):.1%}",
            each.meaning,
        )
        for each in held_bytes
        for nbytes in [int(sum(each.parts(stats).values()))]
    ]
