"""Statistics of a pool: counts of what it did, and snapshots of what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from paged_kv.allocator.allocator_stats import AllocatorStats, BlockTotals, FormatStats
from paged_kv.allocator.events import Events
from paged_kv.pool.columns import COLUMNS, byte_rows
from paged_kv.sizes import format_size


@dataclass(frozen=True)
class GroupStats(AllocatorStats):
    """A snapshot of the layers that share one block table.

    Attributes:
        layers: number of layers.
        window: tokens that they see; None for all.
        gather_fallbacks: times keys and values were gathered for attention that does not
            read pages.
        plain_layers: layers that no kernel of the pool's backend takes, so that MLX's own
            operations serve them.
    """

    layers: int = 0
    window: int | None = None
    gather_fallbacks: int = 0
    plain_layers: int = 0


@dataclass(frozen=True)
class PoolStats(BlockTotals):
    """A snapshot of a pool. Every byte of `bytes_mapped` is explained in
    `paged_kv.allocator.allocator_stats`; all sums over groups are properties. `bytes_held` is what
    MLX holds for the pool (`mx.get_active_memory`), as long as MLX hands out no larger memory that
    it has kept (`mx.set_cache_limit`), and kernels' arguments aside, some KB on a GPU.

    Attributes:
        page_format: the page format of full pages.
        backend: the kernels that write and read pages.
        bytes_budget: the most bytes that may be mapped.
        groups: the layers without a window, and those of each window, once they were written.
        evictions: blocks' worth of cached tokens that were evicted, by reason: "out_of_window",
            memory was needed, and blocks that a window has passed go first; "room", memory was
            needed; "exhausted", memory was needed and nothing else was left to try; "limit", there
            were more prompts or bytes than the caller allows; "clear" was called; "forgotten", a
            prompt was forgotten, or a session ended.
        requantisations: blocks requantised because memory was short, by their new format.
        prefix_queries: tokens of all prompts that were looked up.
        prefix_hits: those of them that were cached.
        kernel_fallbacks: times MLX's own operations had to do what a kernel of the backend could
            not, besides those of `plain_layers`.
        preemptions: times a sequence of a batch lost its pages, to return later.
        tokens_recomputed: tokens of preempted sequences that were computed again.
        tokens_reread: tokens of preempted sequences that were read again from a store.
        tokens_read: tokens of all prompts that were read from a store.
        store_hits: tokens of all prompts that were read from each tier of the store.
        store_bytes_read: bytes of pages read from each tier.
        store_bytes_today: bytes written to each tier since midnight, UTC.
        store_bytes_in_all: bytes written to each tier so far. For a folder both counts are those of
            all processes that share it.
        drafts: steps of sequences in which tokens were drafted for them.
        draft_tokens: drafted tokens.
        accepted_tokens: drafted tokens that the model accepted.
        tokens_chosen: tokens that steps read which may not read all of a sequence's.
        tokens_left_out: tokens that they did not read.
        pages_fetched: pages of a layer that were read from the folder of offloaded pages.
        pages_late: pages of a layer that a step wanted, and left out because they had not come.
        bytes_offloaded: contents of pages that are in that folder.
        bytes_steps: keys and values of steps that no page holds yet.
        bytes_states: states of recurrent layers that the prefix cache keeps.
        bytes_scratch: what alignment adds to slabs, and arrays that the backend keeps.
        pages_pinned: pages' worth of cached tokens that are pinned.
        traces_stopped: traces that ended early, because their file could not be written.
    """

    page_format: str
    backend: str
    bytes_budget: int
    groups: tuple[GroupStats, ...] = ()
    evictions: Mapping[str, int] = field(default_factory=dict)
    requantisations: Mapping[str, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    kernel_fallbacks: int = 0
    preemptions: int = 0
    tokens_recomputed: int = 0
    tokens_reread: int = 0
    tokens_read: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens_chosen: int = 0
    tokens_left_out: int = 0
    pages_fetched: int = 0
    pages_late: int = 0
    bytes_offloaded: int = 0
    bytes_steps: int = 0
    bytes_states: int = 0
    bytes_scratch: int = 0
    pages_pinned: int = 0
    traces_stopped: int = 0
    store_hits: Mapping[str, int] = field(default_factory=dict)
    store_bytes_read: Mapping[str, int] = field(default_factory=dict)
    store_bytes_today: Mapping[str, int] = field(default_factory=dict)
    store_bytes_in_all: Mapping[str, int] = field(default_factory=dict)
    formats: tuple[FormatStats, ...] = field(init=False)

    def __post_init__(self) -> None:
        of_all_groups = tuple([each for group in self.groups for each in group.formats])
        object.__setattr__(self, "formats", of_all_groups)

    def __str__(self) -> str:
        """The table of held bytes, for `print`."""
        head = f"{self.page_format} pages, {self.backend}, {format_size(self.bytes_budget)} allowed"
        rows = [
            f"{label:<16}{size:>12}{share:>8}  {meaning}"
            for label, size, share, meaning in byte_rows(self)
        ]
        return "\n".join([head, *rows])

    @property
    def blocks_shared(self) -> int:
        """Blocks that more than one sequence holds."""
        return sum(group.blocks_shared for group in self.groups)

    @property
    def table_entries(self) -> int:
        """Entries of all block tables."""
        return sum(group.table_entries for group in self.groups)

    @property
    def tables(self) -> int:
        """Block tables: one for each sequence and group."""
        return sum(group.tables for group in self.groups)

    @property
    def tables_dropped(self) -> int:
        """Block tables that were dropped; the next call frees their blocks."""
        return sum(group.tables_dropped for group in self.groups)

    @property
    def sharing_factor(self) -> float:
        """Table entries for each used block; 1.0 if nothing is shared."""
        return self.table_entries / self.blocks_used if self.blocks_used else 1.0

    @property
    def bytes_metadata(self) -> int:
        """An estimate of the bookkeeping's memory in Python."""
        return sum(group.bytes_metadata for group in self.groups)

    @property
    def cow_copies(self) -> int:
        """Blocks copied because a shared one was written."""
        return sum(group.cow_copies for group in self.groups)

    @property
    def allocation_failures(self) -> int:
        """Times the pool was exhausted."""
        return sum(group.allocation_failures for group in self.groups)

    @property
    def gather_fallbacks(self) -> int:
        """Times keys and values were gathered for attention that does not read pages."""
        return sum(group.gather_fallbacks for group in self.groups)

    @property
    def plain_layers(self) -> int:
        """Layers that MLX's own operations serve because no kernel takes them."""
        return sum(group.plain_layers for group in self.groups)

    @property
    def bytes_beside(self) -> int:
        """Bytes that are held beside slabs."""
        return self.bytes_steps + self.bytes_states + self.bytes_scratch

    @property
    def bytes_held(self) -> int:
        """Bytes that MLX holds for the pool."""
        return self.bytes_mapped + self.bytes_beside

    @property
    def usage(self) -> float:
        """The share of the budget that pages of used blocks take."""
        return self.bytes_active / self.bytes_budget

    @property
    def prefix_hit_rate(self) -> float:
        """The share of looked up tokens that were cached; 0.0 if none were looked up."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0

    def __add__(self, other: PoolStats) -> PoolStats:
        """The sum of two pools under one budget."""
        return replace(
            self,
            groups=self.groups + other.groups,
            evictions=sum_counts([self.evictions, other.evictions]),
            requantisations=sum_counts([self.requantisations, other.requantisations]),
            pages_pinned=self.pages_pinned + other.pages_pinned,
            traces_stopped=self.traces_stopped + other.traces_stopped,
            prefix_queries=self.prefix_queries + other.prefix_queries,
            prefix_hits=self.prefix_hits + other.prefix_hits,
            preemptions=self.preemptions + other.preemptions,
            tokens_recomputed=self.tokens_recomputed + other.tokens_recomputed,
            tokens_reread=self.tokens_reread + other.tokens_reread,
            tokens_read=self.tokens_read + other.tokens_read,
            store_hits=sum_counts([self.store_hits, other.store_hits]),
            store_bytes_read=sum_counts([self.store_bytes_read, other.store_bytes_read]),
            store_bytes_today=sum_counts([self.store_bytes_today, other.store_bytes_today]),
            store_bytes_in_all=sum_counts([self.store_bytes_in_all, other.store_bytes_in_all]),
            drafts=self.drafts + other.drafts,
            draft_tokens=self.draft_tokens + other.draft_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
            tokens_chosen=self.tokens_chosen + other.tokens_chosen,
            tokens_left_out=self.tokens_left_out + other.tokens_left_out,
            pages_fetched=self.pages_fetched + other.pages_fetched,
            pages_late=self.pages_late + other.pages_late,
            bytes_offloaded=self.bytes_offloaded + other.bytes_offloaded,
            kernel_fallbacks=self.kernel_fallbacks + other.kernel_fallbacks,
            bytes_steps=self.bytes_steps + other.bytes_steps,
            bytes_states=self.bytes_states + other.bytes_states,
            bytes_scratch=self.bytes_scratch + other.bytes_scratch,
        )

    def as_dict(self) -> dict[str, Any]:
        """A dictionary for JSON, with the sums of all groups."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        groups = [
            {**asdict(group), "formats": [each._asdict() for each in group.formats]}
            for group in self.groups
        ]
        columns = {column.name: column.of(self) for column in COLUMNS}
        return {**own, **columns, "groups": groups}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PoolStats:
        """The snapshot from its dictionary.

        Raises:
            ValueError: it is none; the message says what is missing or too much.
        """
        own = {each.name: content[each.name] for each in fields(cls) if each.name in content}
        try:
            groups = [
                {**group, "formats": tuple([FormatStats(**each) for each in group["formats"]])}
                for group in content.get("groups", [])
            ]
            own["groups"] = tuple([GroupStats(**group) for group in groups])
            return cls(**own)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is not a snapshot of this version: {error}") from None


def no_stats() -> PoolStats:
    """The statistics of no pool at all."""
    return PoolStats(page_format="fp16", backend="replay", bytes_budget=1)


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


def sum_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counts of the same things."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


@dataclass
class PoolCounts:
    """See `PoolStats`, which has the same names.

    Attributes:
        events: notified of look-ups, which the allocators do not know.
        of_store: returns the counts of a store, by name and tier.
    """

    events: Events
    of_store: Callable[[], Mapping[str, Mapping[str, int]]] = dict
    evictions: Counter[str] = field(default_factory=Counter)
    requantisations: Counter[str] = field(default_factory=Counter)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    tokens_recomputed: int = 0
    tokens_read: int = 0
    tokens_reread: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens_chosen: int = 0
    tokens_left_out: int = 0

    def look_up(self, num_tokens: int, found: int) -> None:
        """Count the look-up of a prompt of `num_tokens` tokens, of which `found` were cached."""
        self.prefix_queries += num_tokens
        self.prefix_hits += found
        self.events.looked_up(num_tokens, found)

    def note_draft(self, drafted: int, accepted: int) -> None:
        """Count a step of one sequence; one without drafted tokens does not count."""
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def frozen(self) -> dict[str, Any]:
        """A copy of the counts, by name."""
        aside = ("events", "of_store")
        counts = {name: value for name, value in vars(self).items() if name not in aside}
        return {
            **counts,
            **self.of_store(),
            "evictions": dict(self.evictions),
            "requantisations": dict(self.requantisations),
        }
