"""What a pool holds, as tables and as a map for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paged_kv.allocator.block_map import CACHED, FREE, SHARED, USED, SlabMap
from paged_kv.monitor.process_view import PoolView, ProcessView, SequenceView
from paged_kv.pool.stats import PoolStats
from paged_kv.sizes import format_size

# Without colours states are still told apart.
MARKS = {USED: "■", SHARED: "▣", CACHED: "□", FREE: "·"}
WORDS = {USED: "used", SHARED: "shared", CACHED: "cached", FREE: "free"}
_COLOURS = {"fp16": "cyan", "q8": "green", "q4": "yellow"}
# From this share of what is mapped on, the waiting that compaction costs is worth it.
COMPACT_FROM = 0.05


def process_tables(view: ProcessView) -> RenderableType:
    """The tables of all pools of a process."""
    head = Text(f"process {view.pid}: {view.command}", style="bold", overflow="ellipsis")
    if not view.pools:
        return Group(head, Text("no pool of pages yet"))
    parts = [pool_tables(pool) for pool in view.pools]
    return Group(head, *parts)


def pool_tables(pool: PoolView) -> RenderableType:
    """The bytes, blocks and events of one pool."""
    stats = pool.stats
    head = Text(f"\npool {pool.number}, {pool.name}: {stats.page_format} pages, {stats.backend}")
    parts: list[RenderableType] = [head, bytes_table(stats), blocks_table(stats), events(stats)]
    return Group(*parts)


def bytes_table(stats: PoolStats) -> Table:
    """Every mapped byte, in one row."""
    table = Table("bytes", box=None, pad_edge=False)
    for name in ("", "of mapped"):
        table.add_column(name, justify="right")
    table.add_column("")
    rows = [
        ("allocated", stats.bytes_allocated, "rows of live tokens"),
        ("+ tail", stats.bytes_tail, "rows behind the last token of a sequence"),
        ("+ ring slack", stats.bytes_out_of_window, "rows that a window has left"),
        ("= active", stats.bytes_active, f"{stats.blocks_used} blocks in use"),
        ("+ retained", stats.bytes_retained, "cached prefixes, evicted for others"),
        ("+ stranded", stats.bytes_stranded, "free, in slabs that hold something"),
        ("+ spare", stats.bytes_spare, "slabs that hold nothing"),
        ("= mapped", stats.bytes_mapped, f"{stats.slabs} slabs"),
    ]
    for name, nbytes, meaning in rows:
        share = nbytes / stats.bytes_mapped if stats.bytes_mapped else 0
        style = "bold" if name.startswith("=") else ""
        table.add_row(name, format_size(nbytes), f"{share:.1%}", meaning, style=style)
    budget = f"{stats.bytes_mapped / stats.bytes_budget:.1%} of it mapped"
    table.add_row("budget", format_size(stats.bytes_budget), "", budget)
    table.add_row("metadata", format_size(stats.bytes_metadata), "", "bookkeeping, not in slabs")
    return table


def blocks_table(stats: PoolStats) -> Table:
    """Blocks by group, format and state."""
    table = Table("\nblocks", box=None, pad_edge=False)
    for name in ("used", "cached", "free", "tail rows", "ring rows", "slabs", "a block"):
        table.add_column(f"\n{name}", justify="right")
    for group in stats.groups:
        # A trace does not tell how many layers there are.
        layers = f"{group.layers} layer{'s' if group.layers > 1 else ''}" if group.layers else "all"
        name = layers if group.window is None else f"{layers}, window {group.window:,}"
        for each in group.formats:
            free = each.spare + each.stranded
            numbers = (each.used, each.cached, free, each.tail_rows, each.ring_rows, each.slabs)
            cells = [f"{number:,}" for number in numbers]
            table.add_row(f"{name}, {each.page_format}", *cells, format_size(each.block_bytes))
    return table


def events(stats: PoolStats) -> Text:
    """What has happened, in some lines."""
    hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0
    lines = [
        f"\n{stats.tables} block tables, sharing factor {stats.sharing_factor:.2f} "
        f"({stats.table_entries:,} entries), {stats.cow_copies:,} copied on write",
        f"prefixes: {stats.prefix_hits:,} of {stats.prefix_queries:,} tokens found ({hits:.0%})",
        f"evicted: {_counts(stats.evictions)}; made smaller: {_counts(stats.requantisations)}",
        f"{stats.allocation_failures:,} times out of room, "
        f"{stats.gather_fallbacks:,} gathers for attention that does not read pages",
    ]
    if stats.plain_layers or stats.kernel_fallbacks:
        lines.append(
            f"without kernels: {stats.plain_layers} layers, and {stats.kernel_fallbacks:,} calls"
        )
    if stats.tables_dropped:
        lines.append(f"{stats.tables_dropped} tables were dropped; the next step frees them")
    if stats.bytes_mapped and stats.bytes_compactable / stats.bytes_mapped >= COMPACT_FROM:
        lines.append(f"compact() would give back {format_size(stats.bytes_compactable)}")
    return Text("\n".join(lines))


def process_list(views: list[ProcessView]) -> Table:
    """A row for each process."""
    table = Table(box=None, pad_edge=False)
    for name in ("pid", "pools", "active", "mapped"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("command", overflow="fold")
    for view in views:
        active, mapped = (
            format_size(sum(getattr(pool.stats, name) for pool in view.pools))
            for name in ("bytes_active", "bytes_mapped")
        )
        table.add_row(str(view.pid), str(len(view.pools)), active, mapped, view.command)
    return table


def sequences_table(sequences: tuple[SequenceView, ...]) -> Table:
    """The largest sequences."""
    table = Table("largest", box=None, pad_edge=False)
    for name in ("tokens", "blocks", "shared", "bytes"):
        table.add_column(name, justify="right")
    for each in sequences:
        cells = [f"{number:,}" for number in (each.tokens, each.blocks, each.shared)]
        table.add_row(each.name, *cells, format_size(each.nbytes))
    return table


def map_text(pool: PoolView, columns: int, lines: int) -> Text:
    """The map of a pool, a mark for each block or run of blocks of a slab."""
    blocks = sum(len(slab.states) for _, slab in pool.slabs)
    run = 1
    while blocks > run * columns * max(1, lines - 2 * len(pool.slabs)) and run < blocks:
        run *= 2
    text = Text(f"map: {f'{run} blocks' if run > 1 else 'a block'} a mark\n", style="bold")
    for group in range(len(pool.stats.groups)):
        if len(pool.stats.groups) > 1:
            window = pool.stats.groups[group].window
            text.append(f"{'all tokens' if window is None else f'window {window:,}'}\n")
        text.append_text(_wrapped(_cells(pool, group, run), columns))
    for state, mark in MARKS.items():
        text.append(f"{mark} {WORDS[state]}  ")
    for name in dict.fromkeys(slab.page_format for _, slab in pool.slabs):
        text.append(f"{name}  ", style=_style(name, USED))
    return text


def _cells(pool: PoolView, group: int, run: int) -> Iterator[tuple[str, str]]:
    """The format and state of each mark."""
    for owner, slab in pool.slabs:
        if owner == group:
            yield from ((slab.page_format, state) for state in coarse(slab, run))


def coarse(slab: SlabMap, run: int) -> list[str]:
    """The most frequent state of each run of blocks; of equally frequent ones the busier one."""
    parts = [slab.states[at : at + run] for at in range(0, len(slab.states), run)]
    return [max((SHARED, USED, CACHED, FREE), key=Counter(part).__getitem__) for part in parts]


def _wrapped(cells: Iterator[tuple[str, str]], columns: int) -> Text:
    text = Text()
    for number, (page_format, state) in enumerate(cells):
        if number and not number % columns:
            text.append("\n")
        text.append(MARKS[state], style=_style(page_format, state))
    return text.append("\n")


def _style(page_format: str, state: str) -> str:
    if state == FREE:
        return "dim"
    # Of a pair such as q8/q4 the keys' format decides.
    colour = _COLOURS.get(page_format.partition("/")[0], "magenta")
    return {USED: colour, SHARED: f"bold bright_{colour}", CACHED: f"dim {colour}"}[state]


def _counts(counts: Mapping[str, int]) -> str:
    there = [f"{number:,} {name}" for name, number in counts.items() if number]
    return ", ".join(there) or "none"
