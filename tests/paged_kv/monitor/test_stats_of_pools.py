"""Statistics of several pools: the sums, and the metrics of each."""

from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from paged_kv.allocator.allocator_stats import FormatStats
from paged_kv.monitor.process_view import PoolView, ProcessView
from paged_kv.monitor.stats_table import numbers
from paged_kv.pool.columns import COLUMNS, Column
from paged_kv.pool.stats import GroupStats, PoolStats
from paged_kv.server import status_page


def stats(first: int) -> PoolStats:
    """Of a pool of one group, in which no two numbers are alike."""
    blocks = FormatStats(
        "q8", 100, 10, 1, used=first, cached=first + 1, spare=first + 2, fragmented=first + 3,
        last_block_slots=first + 4, out_of_window_slots=first + 5, compactable=first + 6,
    )  # fmt: skip
    group = GroupStats(
        (blocks,), first + 7, first + 8, first + 9, first + 10, first + 11, first + 12,
        gather_fallbacks=first + 13,
    )  # fmt: skip
    return PoolStats(
        "q8", "plain", 10**6, (group,), {"room": first + 14, "limit": first + 15},
        {"q4": first + 16}, first + 17, first + 18, first + 19, first + 20, first + 21,
        first + 22, first + 23, first + 24, first + 25, first + 26,
        first + 27, first + 28, first + 29,
    )  # fmt: skip


def test_numbers_of_pools_under_one_budget_are_added() -> None:
    one, other = stats(100), stats(200)
    both = one + other
    for name in (
        "prefix_queries", "prefix_hits", "kernel_fallbacks", "gather_fallbacks", "cow_copies",
        "allocation_failures", "blocks_used", "blocks_cached", "blocks_free", "blocks_shared",
        "bytes_mapped", "bytes_allocated", "bytes_last_block", "bytes_out_of_window",
        "bytes_compactable", "bytes_steps", "bytes_states", "bytes_scratch", "bytes_held",
        "table_entries", "tables", "tables_dropped", "preemptions", "tokens_recomputed",
        "tokens_reread", "tokens_read", "drafts", "draft_tokens", "accepted_tokens",
    ):  # fmt: skip
        assert getattr(both, name) == getattr(one, name) + getattr(other, name), name
    assert both.evictions == {"room": 328, "limit": 330}
    assert both.requantisations == {"q4": 332}
    assert both.bytes_budget == 10**6
    assert both.usage == one.usage + other.usage


def test_metrics_say_what_the_numbers_are() -> None:
    pytest.importorskip("prometheus_client")
    from paged_kv.monitor.prometheus_metrics import metrics_text

    view = ProcessView(1, "command", 0.0, (PoolView("llama", 3, stats(100)),))
    found = dict(
        line.rsplit(" ", 1)
        for line in metrics_text(view).decode().splitlines()
        if not line.startswith("#")
    )
    labels = 'model="llama",pool="3"'
    for name, number in (
        (f'kv_blocks{{format="q8",{labels},state="used"}}', 100),
        (f'kv_blocks{{format="q8",{labels},state="cached"}}', 101),
        (f'kv_blocks{{format="q8",{labels},state="free"}}', 102 + 103),
        (f'evictions_total{{{labels},reason="room"}}', 114),
        (f"prefix_cache_queries_total{{{labels}}}", 117),
        (f"prefix_cache_hits_total{{{labels}}}", 118),
        (f"num_preemptions_total{{{labels}}}", 120),
        (f"cow_copies_total{{{labels}}}", 111),
        (f"kv_active_bytes{{{labels}}}", 100 * 100),
        (f"kv_cache_usage_perc{{{labels}}}", 0.01),
    ):
        assert float(found.get(f"paged_kv:{name}", "nan")) == number, (name, sorted(found))


@pytest.fixture
def made_up() -> Iterator[Column]:
    """A column that the statistics have for one test."""
    column = Column(
        "kept", "a made-up number", "kept by us", "kept_blocks",
        read=lambda stats: stats.blocks_used + stats.blocks_cached,
    )  # fmt: skip
    COLUMNS.append(column)
    yield column
    COLUMNS.remove(column)


def test_json_tables_metrics_and_the_page_have_a_new_column(made_up: Column) -> None:
    pytest.importorskip("prometheus_client")
    from paged_kv.monitor.prometheus_metrics import metrics_text

    view = ProcessView(1, "command", 0.0, (PoolView("llama", 3, stats(100)),))
    content = view.as_dict()
    assert content["pools"][0]["stats"]["kept"] == 201
    assert ProcessView.from_dict(content) == view
    console = Console(record=True, width=200, file=StringIO())
    console.print(numbers(stats(100)))
    assert "kept by us 201" in console.export_text()
    assert 'paged_kv:kept_blocks{model="llama",pool="3"} 201.0' in metrics_text(view).decode()
    shown = {"name": "kept", "label": "kept by us", "meaning": made_up.meaning, "unit": "count"}
    assert status_page.columns()[-1] == shown
