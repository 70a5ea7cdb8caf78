"""Draws a pool in a terminal, as tables and as a map, once or again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import cycle

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paged_kv.allocator.allocator_stats import Unit
from paged_kv.allocator.block_allocator import CACHED, FREE, SHARED, USED, SlabMap
from paged_kv.checks import counted, format_size
from paged_kv.monitor.processes import PoolView, ProcessView, SequenceView
from paged_kv.pool.stats import COLUMNS, PoolStats, byte_rows

# The marks differ without colours too.
MARKS = {USED: "■", SHARED: "▣", CACHED: "□", FREE: "·"}
WORDS = {USED: "used", SHARED: "shared", CACHED: "cached", FREE: "free"}
_FIRST = [each for each in COLUMNS if each.name.endswith("_fragmentation")]
_OTHERS = [
    each
    for each in COLUMNS
    if each.label and each.unit is not Unit.HELD_BYTES and each not in _FIRST
]
# Of the first page format of a pool, the second, and so on.
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue")


def process_tables(view: ProcessView) -> RenderableType:
    """The tables of all pools of a process, and the bytes of each process of its model."""
    rows = [
        (str(rank), *map(format_size, (memory.active, memory.mapped, memory.budget)))
        for rank, memory in view.ranks
    ]
    ranks = _table(("\nrank", "\nin use", "\nmapped", "\nallowed"), rows)
    tables = [*map(pool_tables, view.pools), *([ranks] if view.pools and rows else [])]
    return Group(*_head(view), *tables)


def _head(view: ProcessView) -> list[RenderableType]:
    head = Text(f"process {view.pid}: {view.command}", style="bold", overflow="ellipsis")
    return [head] if view.pools else [head, Text("no pool of pages yet")]


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table whose first column is text, and whose others are numbers."""
    first, *others = names
    table = Table(first, box=None, pad_edge=False)
    for name in others:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def pool_tables(pool: PoolView) -> RenderableType:
    """The bytes, blocks and events of one pool."""
    stats = pool.stats
    head = Text(f"\npool {pool.number}, {pool.name}: {stats.page_format} pages, {stats.backend}")
    return Group(
        head, fragmentation(stats), bytes_table(stats), blocks_table(stats), numbers(stats)
    )


def fragmentation(stats: PoolStats) -> Text:
    """What is lost: first, as it is what people look for."""
    shares = [f"{each.label} {_number(each.unit, getattr(stats, each.name))}" for each in _FIRST]
    return Text(f"{', '.join(shares)}\n")


def bytes_table(stats: PoolStats) -> Table:
    """Every held byte, in one row."""
    table = _table(("bytes", "", "of held"), ())
    table.add_column("")
    for label, *cells in byte_rows(stats):
        table.add_row(label, *cells, style="bold" if label.startswith("=") else "")
    return table


def blocks_table(stats: PoolStats) -> Table:
    """Blocks by group, format and state."""
    names = ("blocks", "used", "cached", "free", "last block", "out of window", "slabs", "a block")
    rows = []
    for group in stats.groups:
        layers = counted(group.layers, "layer")
        name = layers if group.window is None else f"{layers}, window {group.window:,}"
        for each in group.formats:
            idle = each.last_block_slots, each.out_of_window_slots
            counts = (each.used, each.cached, each.free, *idle, each.slabs)
            cells = [f"{count:,}" for count in counts]
            rows.append((f"{name}, {each.page_format}", *cells, format_size(each.block_bytes)))
    return _table([f"\n{name}" for name in names], rows)


def numbers(stats: PoolStats) -> RenderableType:
    """The other numbers, without those that are zero."""
    told = []
    for column in _OTHERS:
        parts = [(part, number) for part, number in column.parts(stats).items() if number]
        words = [" ".join([_number(column.unit, number), *part]) for part, number in parts]
        told += [Text(f"{column.label} {', '.join(words)}")] if words else []
    return Group(Text(""), Columns(told, equal=True, padding=(0, 3)))


def _number(unit: Unit, number: float) -> str:
    if unit in (Unit.HELD_BYTES, Unit.BYTES):
        return format_size(int(number))
    return format(number, {Unit.SHARE: ".1%", Unit.FACTOR: ".2f", Unit.COUNT: ","}[unit])


def process_list(views: list[ProcessView]) -> Table:
    """One row per process."""
    table = Table(box=None, pad_edge=False)
    for name in ("pid", "pools", "used", "held"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("command", overflow="fold")
    for view in views:
        used, held = (
            format_size(sum(getattr(pool.stats, name) for pool in view.pools))
            for name in ("bytes_active", "bytes_held")
        )
        table.add_row(str(view.pid), str(len(view.pools)), used, held, view.command)
    return table


def sequences_table(sequences: tuple[SequenceView, ...]) -> Table:
    """The largest sequences."""
    rows = [
        (each.name, *[f"{count:,}" for count in each[1:4]], format_size(each.nbytes))
        for each in sequences
    ]
    return _table(("largest", "tokens", "blocks", "shared", "bytes"), rows)


def map_text(pool: PoolView, columns: int, lines: int) -> Text:
    """The map of a pool: a mark for each block of a slab, or for each run of blocks."""
    blocks = sum(len(slab.states) for _, slab in pool.slabs)
    run = 1
    while blocks > run * columns * max(1, lines - 2 * len(pool.slabs)) and run < blocks:
        run *= 2
    text = Text(f"map: {f'{run} blocks' if run > 1 else 'a block'} a mark\n", style="bold")
    # Also of formats that no slab has now.
    names = dict.fromkeys(each.page_format for each in pool.stats.formats)
    colours = dict(zip(names, cycle(_COLOURS), strict=False))
    for group in range(len(pool.stats.groups)):
        if len(pool.stats.groups) > 1:
            window = pool.stats.groups[group].window
            text.append(f"{'all tokens' if window is None else f'window {window:,}'}\n")
        slabs = [slab for owner, slab in pool.slabs if owner == group]
        cells = [(slab.page_format, state) for slab in slabs for state in coarse(slab, run)]
        for at, (page_format, state) in enumerate(cells):
            if at and not at % columns:
                text.append("\n")
            text.append(MARKS[state], style=_style(colours[page_format], state))
        text.append("\n")
    for state, mark in MARKS.items():
        text.append(f"{mark} {WORDS[state]}  ")
    for name in dict.fromkeys(slab.page_format for _, slab in pool.slabs):
        text.append(f"{name}  ", style=_style(colours[name], USED))
    return text


def coarse(slab: SlabMap, run: int) -> list[str]:
    """The most frequent state of each run of blocks; the busier one of two that are equally
    frequent."""
    parts = [slab.states[at : at + run] for at in range(0, len(slab.states), run)]
    return [max((SHARED, USED, CACHED, FREE), key=Counter(part).__getitem__) for part in parts]


def _style(colour: str, state: str) -> str:
    if state == FREE:
        return "dim"
    return {USED: colour, SHARED: f"bold bright_{colour}", CACHED: f"dim {colour}"}[state]


def watch(views: Iterable[ProcessView], console: Console) -> None:
    """Draw one view after the other."""
    if not console.is_terminal:
        for view in views:
            console.print(screen(view, console))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for view in views:
            live.update(screen(view, console), refresh=True)


def screen(view: ProcessView, console: Console) -> RenderableType:
    """All pools of a process, each with its map, figures and largest sequences."""
    parts = _head(view)
    lines = max(6, console.height // max(1, len(view.pools)) - 24)
    for pool in view.pools:
        name = f"\npool {pool.number}, {pool.name}: {pool.stats.usage:.1%} of the budget used"
        parts += [Text(name), map_text(pool, console.width, lines), Text("")]
        parts += [fragmentation(pool.stats), bytes_table(pool.stats), numbers(pool.stats)]
        if pool.sequences:
            parts += [Text(""), sequences_table(pool.sequences)]
    return Group(*parts)
