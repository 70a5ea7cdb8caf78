"""Plots the history of pools. Needs the extra "plot"."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paged_kv.allocator.block_allocator import CACHED, FREE, SHARED, USED
from paged_kv.monitor.processes import PoolView, ProcessView
from paged_kv.monitor.stats_table import WORDS, coarse
from paged_kv.pool.stats import COLUMNS, PoolStats

# A palette that colour-blind readers can tell apart (Okabe and Ito).
COLOURS = {FREE: "#dddddd", CACHED: "#f0c05a", USED: "#0072b2", SHARED: "#d55e00"}
LOSSES = {
    "bytes_last_block": "#0072b2",
    "bytes_out_of_window": "#009e73",
    "bytes_fragmented": "#d55e00",
    "bytes_spare": "#999999",
}
STATES = (FREE, CACHED, USED, SHARED)
SUFFIXES = (".svg", ".png", ".html")
_COLUMNS = 64
_MOST_LINES = 48
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": "small"}

_NO_POOLS = PoolStats(page_format="fp16", backend="replay", bytes_budget=1)


class _History:
    """What views of one process say over time: the sum of all pools, at seconds since the first
    view, and the pools with their maps when most bytes were active."""

    def __init__(self, views: Iterable[ProcessView]) -> None:
        self.title = ""
        self.seconds: list[float] = []
        self.stats: list[PoolStats] = []
        self.peak: tuple[PoolView, ...] = ()
        began, most = None, -1
        for view in views:
            began = view.time if began is None else began
            self.title = f"process {view.pid}: {view.command}"
            self.seconds.append(view.time - began)
            pools = [pool.stats for pool in view.pools] or [_NO_POOLS]
            # Each pool has a budget of its own.
            budget = sum(pool.bytes_budget for pool in pools)
            self.stats.append(replace(sum(pools[1:], pools[0]), bytes_budget=budget))
            if self.stats[-1].bytes_active > most:
                most, self.peak = self.stats[-1].bytes_active, view.pools


def draw(views: Iterable[ProcessView], path: Path) -> None:
    """Draw what views of a process say over time: blocks by state, what memory is lost to, and the
    map at the peak.

    Raises:
        ValueError: there is nothing to draw, or no such kind of file.
        OSError: the file cannot be written.
    """
    require_drawable(path)
    history = _History(views)
    if not history.stats:
        raise ValueError("there is nothing to draw: the process has ended before its first sample")
    with rc_context({"svg.hashsalt": "paged_kv"}):
        figure = Figure(figsize=(10, 8), layout="constrained")
        blocks, losses, map_axes = figure.subplots(3, 1, height_ratios=(2, 2, 2))
        figure.suptitle(history.title[:100], fontsize="medium", parse_math=False)
        _draw_blocks(history, blocks)
        _draw_losses(history, losses)
        _draw_map(history.peak, map_axes)
        # No time of day: the same history makes the same file.
        if path.suffix == ".html":
            picture = io.StringIO()
            figure.savefig(picture, format="svg", metadata={"Date": None})
            _, tag, svg = picture.getvalue().partition("<svg")
            path.write_text(
                '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
                f"<title>{escape(history.title)}</title>\n<body>\n{tag}{svg}\n</body>\n</html>\n"
            )
        else:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, metadata=metadata, dpi=120)


def require_drawable(path: Path) -> None:
    """Check the path of a picture before its data are collected.

    Raises:
        ValueError: there is no such kind of file.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}")


def _draw_blocks(history: _History, axes: Any) -> None:
    stats = history.stats
    parts = {
        "used": ([each.blocks_used - each.blocks_shared for each in stats], COLOURS[USED]),
        "shared": ([each.blocks_shared for each in stats], COLOURS[SHARED]),
        "cached": ([each.blocks_cached for each in stats], COLOURS[CACHED]),
        "free": ([each.blocks_free for each in stats], COLOURS[FREE]),
    }
    axes.stackplot(
        history.seconds,
        *[counts for counts, _ in parts.values()],
        labels=list(parts),
        colors=[colour for _, colour in parts.values()],
        step="post",
    )
    axes.set(xlabel="seconds", ylabel="blocks", title="Blocks by state")
    axes.legend(**_BESIDE)


def _draw_losses(history: _History, axes: Any) -> None:
    for column in COLUMNS:
        if column.name in LOSSES:
            megabytes = [getattr(each, column.name) / 1e6 for each in history.stats]
            label = str(column.label).removeprefix("+ ")
            axes.step(
                history.seconds, megabytes, where="post", label=label, color=LOSSES[column.name]
            )
    axes.set(xlabel="seconds", ylabel="MB", title="Fragmentation and waste")
    axes.legend(**_BESIDE)


def _draw_map(pools: tuple[PoolView, ...], axes: Any) -> None:
    slabs = [slab for pool in pools for _, slab in pool.slabs]
    blocks = sum(len(slab.states) for slab in slabs)
    run = -(-blocks // (_COLUMNS * _MOST_LINES)) or 1
    cells = [STATES.index(state) for slab in slabs for state in coarse(slab, run)]
    lines = [cells[at : at + _COLUMNS] for at in range(0, len(cells), _COLUMNS)] or [[0]]
    width = len(lines[0])
    padded = [line + [len(STATES)] * (width - len(line)) for line in lines]
    colours = ListedColormap([*[COLOURS[state] for state in STATES], "white"])
    axes.imshow(padded, cmap=colours, vmin=0, vmax=len(STATES), aspect="auto")
    unit = "a block" if run == 1 else f"{run} blocks"
    axes.set(xticks=[], yticks=[], title=f"Map at the peak, {unit} a cell, {blocks:,} in all")
    patches = [Patch(color=COLOURS[state], label=WORDS[state]) for state in STATES]
    axes.legend(handles=patches, **_BESIDE)
