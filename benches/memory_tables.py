"""Makes the tables of what a process holds besides pages, and of the numbers that show it."""

from collections.abc import Callable
from typing import Any

from benches.table_cells import count, megabytes, table
from paged_kv.allocator.allocator_stats import Unit
from paged_kv.pool.stats import COLUMNS

Figures = dict[str, Any]


def statistics() -> str:
    """Every number of a pool's statistics, in the order in which `paged-kv stats` shows them."""
    rows = [
        (
            column.label or "",
            f"`{column.name}`",
            f"`{column.metric}{'_total' * column.is_counter}`" if column.metric else "",
            column.meaning,
        )
        for column in sorted(COLUMNS, key=lambda each: each.unit is not Unit.HELD_BYTES)
    ]
    return table(
        ("shown as", "field of `stats()`", "metric, after `paged_kv:`", "means"), rows, texts=4
    )


def freed_buffers(figures: Figures) -> str:
    """What each limit on freed buffers costs, and what is held with it."""
    rows = [
        (
            f"{model}: {_limit(limit, found['step_bytes'])}",
            f"{row['rate_over_no_limit']:.2f}",
            megabytes(row["cache_bytes"]),
            megabytes(row["active_bytes"]),
            megabytes(row["resident_bytes"]),
        )
        for model, found in figures["models"].items()
        for limit, row in found["limits"].items()
    ]
    head = (
        "limit",
        "tokens a second of processor time, beside no limit",
        "freed and kept",
        "held",
        "resident",
    )
    return table(head, rows)


def _limit(name: str, step_bytes: int) -> str:
    return f"**a prompt step, {megabytes(step_bytes)}**" if name == "step" else name


def live_arrays(figures: Figures) -> str:
    """What a server holds after more and more requests, and what caches hold while they grow."""
    served = [
        (
            count(row["requests"]),
            megabytes(row["resident_bytes"]),
            megabytes(row["most_resident_bytes"]),
            count(row["arrays"]),
            megabytes(row["mlx_active_bytes"]),
            megabytes(row["mlx_peak_bytes"]),
            megabytes(row["mlx_cache_bytes"]),
        )
        for row in figures["served"]["noted"]
    ]
    head = ("requests", "resident", "its peak", "live arrays", "MLX holds", "its peak", "MLX keeps")
    stock, paged = (figures["generated"][side]["noted"] for side in ("mlx_lm", "paged"))
    generated = [
        (count(ours["tokens"]), count(theirs["arrays"]), count(ours["arrays"]))
        for theirs, ours in zip(stock, paged, strict=True)
    ]
    rows = f"live arrays while {figures['rows']} sequences decode, after so many tokens"
    parts = [figures[f"{part}_bytes"] for part in ("weight", "server", "step")]
    return (
        f"{table(head, served)}\n\n"
        f"Weights, the budget of pages and a prompt step are {megabytes(sum(parts))} together.\n\n"
        f"{table((rows, 'mlx-lm', 'pages'), generated)}"
    )


TABLES: dict[str, Callable[[Figures], str]] = {
    each.__name__: each for each in (freed_buffers, live_arrays)
}
