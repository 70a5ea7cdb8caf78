"""Plots the history of pools. Needs the extra "plot"."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paged_kv.allocator.block_map import CACHED, FREE, SHARED, USED
from paged_kv.monitor.process_view import History, PoolView
from paged_kv.monitor.stats_table import WORDS, coarse
from paged_kv.pool.stats import COLUMNS

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


def draw(history: History, path: Path) -> None:
    """Draw blocks by state, what memory is lost to, and the map at the peak.

    Raises:
        ValueError: there is nothing to draw, or no such kind of file.
        OSError: the file cannot be written.
    """
    require_drawable(path)
    if not history.samples:
        raise ValueError(f"there is nothing to draw of {history.title}: it has no events")
    with rc_context({"svg.hashsalt": "paged_kv"}):
        _save(_figure(history), path, history.title)


def require_drawable(path: Path) -> None:
    """Check the path of a picture before its data are collected.

    Raises:
        ValueError: there is no such kind of file.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}")


def _figure(history: History) -> Figure:
    figure = Figure(figsize=(10, 8), layout="constrained")
    blocks, losses, map_axes = figure.subplots(3, 1, height_ratios=(2, 2, 2))
    figure.suptitle(history.title[:100], fontsize="medium")
    _draw_blocks(history, blocks)
    _draw_losses(history, losses)
    _draw_map(history.peak, map_axes)
    return figure


def _save(figure: Figure, path: Path, title: str) -> None:
    if path.suffix == ".html":
        path.write_text(_page(figure, title))
    else:
        # No time of day: the same history makes the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=120)


def _draw_blocks(history: History, axes: Any) -> None:
    times = [sample.seconds for sample in history.samples]
    stats = [sample.stats for sample in history.samples]
    parts = {
        "used": ([each.blocks_used - each.blocks_shared for each in stats], COLOURS[USED]),
        "shared": ([each.blocks_shared for each in stats], COLOURS[SHARED]),
        "cached": ([each.blocks_cached for each in stats], COLOURS[CACHED]),
        "free": ([each.blocks_free for each in stats], COLOURS[FREE]),
    }
    axes.stackplot(
        times,
        *[counts for counts, _ in parts.values()],
        labels=list(parts),
        colors=[colour for _, colour in parts.values()],
        step="post",
    )
    axes.set(xlabel="seconds", ylabel="blocks", title="Blocks by state")
    axes.legend(**_BESIDE)


def _draw_losses(history: History, axes: Any) -> None:
    times = [sample.seconds for sample in history.samples]
    stats = [sample.stats for sample in history.samples]
    for column in COLUMNS:
        if column.name in LOSSES:
            megabytes = [getattr(each, column.name) / 1e6 for each in stats]
            label = str(column.label).removeprefix("+ ")
            axes.step(times, megabytes, where="post", label=label, color=LOSSES[column.name])
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


def _page(figure: Figure, title: str) -> str:
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<body>\n{svg}\n</body>\n</html>\n"
    )
