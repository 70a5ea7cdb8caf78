"""Statistics of several pools: the sums, and every form that shows them."""

from collections.abc import Mapping
from dataclasses import fields
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from paged_kv.allocator.allocator_stats import FormatStats
from paged_kv.monitor.processes import PoolView, ProcessView
from paged_kv.monitor.stats_table import pool_tables
from paged_kv.pool.stats import COLUMNS, GroupStats, PoolStats
from paged_kv.server import status_page


def stats(first: int) -> PoolStats:
    """Of a pool of one group, in which no two counts are alike."""
    blocks = FormatStats(
        "q8", 100, 10, 1, used=first, cached=first + 1, spare=first + 2, fragmented=first + 3,
        last_block_slots=first + 4, out_of_window_slots=first + 5, compactable=first + 6,
    )  # fmt: skip
    names = [each.name for each in fields(GroupStats) if each.init and each.metadata]
    numbers: dict[str, Any] = {name: first + 7 + at for at, name in enumerate(names)}
    group = GroupStats(formats=(blocks,), layers=2, **numbers)
    own = [each for each in COLUMNS if each.of is None and each.name not in names]
    of_pool: dict[str, Any] = {
        each.name: {"room": first + 20 + at} if each.by else first + 20 + at
        for at, each in enumerate(own)
        if each.name != "bytes_budget"
    }
    return PoolStats(
        page_format="q8", backend="plain", bytes_budget=10**6, groups=(group,), **of_pool
    )


def test_numbers_of_pools_under_one_budget_are_added() -> None:
    one, other = stats(100), stats(200)
    both = one + other
    for column in COLUMNS:
        if column.unit in ("share", "factor") or column.name == "bytes_budget":
            continue
        mine, others, sums = (column.parts(each) for each in (one, other, both))
        assert sums == {part: mine[part] + others[part] for part in mine}, column.name
    assert (both.bytes_budget, both.bytes_active) == (10**6, 100 * 100 + 200 * 100)
    assert both.usage == one.usage + other.usage
    assert both.sharing_factor == both.table_entries / 300


def test_numbers_are_those_of_formats_and_groups() -> None:
    seen = stats(100)
    assert seen.bytes_last_block == 104 * 100 // 10
    assert seen.bytes_allocated == 100 * 100 - seen.bytes_last_block - seen.bytes_out_of_window
    assert (seen.bytes_mapped, seen.blocks_free) == ((100 + 101 + 102 + 103) * 100, 102 + 103)
    assert seen.internal_fragmentation == 1 - seen.bytes_allocated / seen.bytes_active
    assert seen.bytes_held == seen.bytes_mapped + seen.bytes_beside
    assert seen.cow_copies == seen.groups[0].cow_copies > 100


def test_every_form_shows_every_number() -> None:
    pytest.importorskip("prometheus_client")
    from paged_kv.monitor.prometheus_metrics import metrics_text

    seen = stats(100)
    view = ProcessView(1, "command", 0.0, (PoolView("llama", 3, seen),))
    content = view.as_dict()
    assert ProcessView.from_dict(content) == view
    console = Console(record=True, width=200, file=StringIO())
    console.print(pool_tables(view.pools[0]))
    table = " ".join(console.export_text().split())
    samples = metrics_text(view).decode().splitlines()
    page = {each["name"]: each for each in status_page.columns()}
    for column in COLUMNS:
        value = getattr(seen, column.name)
        assert content["pools"][0]["stats"][column.name] == value
        assert column.label is None or column.label in table
        assert (column.name in page) == (column.label is not None)
        if column.metric is not None:
            label = f',{column.by}="room"' if column.by else ""
            name = f"paged_kv:{column.metric}{'_total' * column.is_counter}"
            number = value["room"] if isinstance(value, Mapping) else value
            found = dict(line.rsplit(" ", 1) for line in samples if line.startswith(name + "{"))
            assert list(map(float, found.values())) == [number]
            assert label.strip(",") in next(iter(found))
    for state, count in (("used", 100), ("cached", 101), ("free", 102 + 103)):
        labels = f'format="q8",model="llama",pool="3",state="{state}"'
        assert f"paged_kv:kv_blocks{{{labels}}} {float(count)}" in samples
    assert page["usage"]["unit"] == "share"
