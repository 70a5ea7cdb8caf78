"""Statistics of several pools: the sums, and the metrics of each."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from inspect import getmembers
from io import StringIO
from typing import ClassVar

import pytest
from rich.console import Console

from paged_kv.allocator.allocator_stats import FormatStats
from paged_kv.allocator.block_map import USED, SlabMap
from paged_kv.allocator.events import NO_EVENTS
from paged_kv.monitor.pool_views import view_process
from paged_kv.monitor.process_view import PoolView, ProcessView
from paged_kv.monitor.stats_table import bytes_table, map_text, numbers, process_tables
from paged_kv.pool.columns import COLUMNS, Column, Unit, byte_rows
from paged_kv.pool.page_pool import PagePool
from paged_kv.pool.stats import GroupStats, PoolCounts, PoolStats
from paged_kv.ranks import RankMemory, Ranks
from paged_kv.server import status_page
from paged_kv.sizes import format_size


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
        (f"kernel_fallbacks_total{{{labels}}}", 119),
        (f"num_preemptions_total{{{labels}}}", 120),
        (f"tokens_recomputed_total{{{labels}}}", 121),
        (f"tokens_reread_total{{{labels}}}", 122),
        (f"tokens_read_total{{{labels}}}", 123),
        (f"spec_decode_num_drafts_total{{{labels}}}", 124),
        (f"spec_decode_num_draft_tokens_total{{{labels}}}", 125),
        (f"spec_decode_num_accepted_tokens_total{{{labels}}}", 126),
        (f"cow_copies_total{{{labels}}}", 111),
        (f"allocation_failures_total{{{labels}}}", 112),
        (f"gather_fallbacks_total{{{labels}}}", 113),
        (f"kv_active_bytes{{{labels}}}", 100 * 100),
        (f"kv_mapped_bytes{{{labels}}}", 406 * 100),
        (f"kv_cache_usage_perc{{{labels}}}", 0.01),
    ):
        assert float(found.get(f"paged_kv:{name}", "nan")) == number, (name, sorted(found))


def test_each_number_has_one_column() -> None:
    told = Counter(column.name for column in COLUMNS if column.read is None)
    shown_apart = {"page_format", "backend", "groups", "formats"}
    fields = {each.name for each in dataclasses.fields(PoolStats)}
    properties = {
        name for name, _ in getmembers(PoolStats, lambda each: isinstance(each, property))
    }
    assert told == Counter((fields | properties) - shown_apart)
    metrics = [column.metric for column in COLUMNS if column.metric is not None]
    assert len(set(metrics)) == len(metrics)


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


def test_the_view_of_a_process_has_the_memory_of_every_rank() -> None:
    class TwoRanks(Ranks):
        memory: ClassVar = {1: RankMemory(2 << 20, 1 << 20, 300), 0: RankMemory(5 << 20, 7, 0)}

    pool = PagePool(1, max_bytes=1 << 20)
    assert view_process([pool]).as_dict().keys().isdisjoint({"ranks"})
    pool.ranks = TwoRanks()
    view = view_process([pool])
    assert view.ranks == tuple(sorted(TwoRanks.memory.items()))
    assert ProcessView.from_dict(json.loads(json.dumps(view.as_dict()))) == view
    console = Console(record=True, width=200, file=StringIO())
    console.print(process_tables(view))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["1", "300", "B", "1.05", "MB", "2.10", "MB"] in lines


def test_a_new_column_of_slab_bytes_is_a_row_of_their_table(made_up: Column) -> None:
    COLUMNS.append(replace(made_up, unit=Unit.HELD_BYTES))
    try:
        rows = bytes_table(stats(100))
    finally:
        COLUMNS.pop()
    assert [*rows.columns[0].cells][-1] == "kept by us"
    assert [*rows.columns[1].cells][-1] == "201 B"


def test_printed_statistics_are_the_table_of_bytes() -> None:
    head, *rows = str(stats(100)).splitlines()
    assert head.endswith(f"{format_size(stats(100).bytes_budget)} allowed")
    assert [row.split("  ")[0] for row in rows] == [row[0] for row in byte_rows(stats(100))]
    assert rows[-1].split() == ["=", "held", *rows[-1].split()[2:]]
    assert "100.0%" in rows[-1]


def test_the_map_tells_formats_apart_by_colours_whatever_their_names_are() -> None:
    (group,) = stats(100).groups
    formats = [group.formats[0]._replace(page_format=name) for name in ("fp16", "q3", "q5/q3")]
    pool_stats = replace(stats(100), groups=(replace(group, formats=tuple(formats)),))
    slabs = [(0, SlabMap(n, name, USED)) for n, name in enumerate(("q5/q3", "q3"))]
    text = map_text(PoolView("llama", 3, pool_stats, tuple(slabs)), 80, 40)
    styles = {text.plain[span.start : span.end].strip(): span.style for span in text.spans}
    assert styles["q3"] != styles["q5/q3"]
    assert [str(span.style) for span in text.spans][:2] == [styles["q5/q3"], styles["q3"]]


def test_numbers_that_are_zero_are_left_out() -> None:
    console = Console(record=True, width=200, file=StringIO())
    console.print(numbers(replace(stats(100), evictions={"room": 0, "limit": 3}, prefix_hits=0)))
    text = console.export_text()
    assert "evicted 3 limit" in text
    assert "room" not in text
    assert "tokens found" not in text


def test_prompts_are_counted_by_what_was_asked_and_what_was_found() -> None:
    counts = PoolCounts(NO_EVENTS)
    for asked, found in ((10, 3), (5, 0), (7, 6)):
        counts.look_up(asked, found)
    assert (counts.prefix_queries, counts.prefix_hits) == (22, 9)
