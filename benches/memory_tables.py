"""Makes the tables of what a process holds besides pages, and of the numbers that show it."""

from typing import Any

from benches.table_cells import table
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
