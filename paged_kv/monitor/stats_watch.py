"""`paged-kv stats --watch`: redraws a pool's map and figures as they change."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from paged_kv.monitor.process_view import ProcessView
from paged_kv.monitor.stats_table import bytes_table, map_text, numbers, sequences_table


def watch(look: Callable[[], ProcessView], console: Console, interval_s: float) -> None:
    """Draw what `look` returns until it is interrupted, or raises.

    Raises:
        OSError: the process cannot be looked at, or has ended.
    """
    if not console.is_terminal:
        while True:
            console.print(screen(look(), console))
            time.sleep(interval_s)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(screen(look(), console), refresh=True)
            time.sleep(interval_s)


def screen(view: ProcessView, console: Console) -> RenderableType:
    """All pools of a process, each with its map, figures and largest sequences."""
    parts: list[RenderableType] = [Text(f"process {view.pid}: {view.command}", style="bold")]
    if not view.pools:
        parts.append(Text("no pool of pages yet"))
    lines = max(6, console.height // max(1, len(view.pools)) - 24)
    for pool in view.pools:
        name = f"\npool {pool.number}, {pool.name}: {pool.stats.usage:.1%} of the budget used"
        parts += [Text(name), map_text(pool, console.width, lines), Text("")]
        parts += [bytes_table(pool.stats), numbers(pool.stats)]
        if pool.sequences:
            parts += [Text(""), sequences_table(pool.sequences)]
    return Group(*parts)
