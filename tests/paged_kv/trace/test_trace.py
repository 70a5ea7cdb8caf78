"""Traces record events of blocks, and replays give the same results, or those of other
parameters."""

import argparse
import copy
import gc
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.command_line import main
from paged_kv.kernels.pages.page_format import page_format_named
from paged_kv.pool.window import Window
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.sizes import format_size, parse_size
from paged_kv.trace.recorder import TracedPool, TraceEvent, TraceFile
from paged_kv.trace.replay import Outcome, Parameters, Replay, read_trace
from paged_kv.trace.synthetic_load import Load, synthesize
from tests.support.folders import ROOT
from tests.support.grids import plain_only
from tests.support.invariants import assert_invariants, used_rows

TOKEN_BYTES = 1000
FORMAT = page_format_named("fp16")


def new_caches(pool: PagePool, sequence: Sequence | None = None) -> list[PagedKVCache]:
    sequence = sequence or Sequence(pool)
    return [PagedKVCache(pool, layer, [sequence]) for layer in range(pool.num_layers)]


def write(caches: list[PagedKVCache], count: int) -> None:
    numbers = mx.zeros((1, 1, count, 4))
    for cache in caches:
        cache.update_and_fetch(numbers, numbers)


def flush(pool: PagePool) -> None:
    events: Any = pool.counts.events
    assert isinstance(events, TracedPool)
    events.flush()


def replayed(path: Path, **parameters: Any) -> Outcome:
    outcome = Replay(read_trace(path), Parameters(**parameters)).run()
    assert_invariants(outcome.stats, outcome.stats.bytes_mapped)
    return outcome


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines()[1:] if not line.startswith("+")]


def test_a_trace_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, name="by hand", trace=str(path))
    first = new_caches(pool)
    write(first, 300)
    for _ in range(20):
        write(first, 1)
    second = copy.deepcopy(first)
    write(second, 1)
    second[0].trim(100)
    del second
    gc.collect()
    write(first, 1)
    flush(pool)
    assert lines(path) == [
        "P 0 0 1048576 by hand",
        "B 0 8192 fp16",
        "G 0 0 0 0 0 0",
        "n 0 0 fp16",
        "w 0 0 300 2",
        "w 0 300 316 0",
        "w 0 316 320 0",
        "f 0 1",
        "c 1 1",
        "w 1 320 321 0",
        "t 1 221",
        "d 1",
        "w 0 320 321 0",
    ]


def test_blocks_that_no_insertion_told_of_count_as_a_tables_own(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, trace=str(path))
    first = new_caches(pool)
    write(first, 300)
    group = pool.groups[0]
    blocks = list(first[0].sequences[0].blocks(group))
    for block in blocks:
        group.allocator.keep(block, lambda source, target: None)
    second = Sequence(pool)
    second.adopt(group, blocks, 290)
    second.table(group).truncate(290)
    group.allocator.evict(blocks[1])
    flush(pool)
    assert lines(path)[-2:] == ["n 1 0 fp16", "w 1 0 290 0"]
    assert replayed(path).stats.table_entries == 4


@pytest.mark.parametrize("seed", plain_only([0, 1], range(4)))
def test_a_replay_comes_to_what_was_recorded(tmp_path: Path, seed: int) -> None:
    """Random use of forks, trims, drops, windows and prefixes."""
    path = tmp_path / "trace"
    rng = random.Random(seed)
    windows = {0: Window(300, 64, sink_tokens=4)} if seed % 2 else {}
    pool = PagePool(2, windows=windows, max_bytes=1 << 24, trace=str(path))
    prefixes = PrefixCache(pool, has_states=False)
    held: list[tuple[list[int], list[PagedKVCache]]] = []
    for _ in range(120):
        choice = rng.random()
        if choice < 0.4 or not held:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 1400))]
            tokens[: len(tokens) // 2] = [7] * (len(tokens) // 2)
            prefix = prefixes.fetch("", tokens, FORMAT)
            caches = new_caches(pool, prefix.sequence)
            step = rng.choice([64, 2048])
            for start in range(prefix.num_tokens, len(tokens), step):
                write(caches, min(step, len(tokens) - start))
            del prefix
            prefixes.insert("", tokens, caches[0].sequences[0], None)
            held.append((tokens, caches))
        elif choice < 0.55:
            held.append(copy.deepcopy(rng.choice(held)))
        elif choice < 0.8:
            write(rng.choice(held)[1], rng.randrange(1, 65))
        elif choice < 0.9:
            caches = rng.choice(held)[1]
            if caches[0].can_trim(9):
                for cache in caches:
                    cache.trim(9)
        else:
            held.pop(rng.randrange(len(held)))
            caches = []
            gc.collect()
    stats = pool.stats()
    pool.check()
    flush(pool)
    letters = {line[0] for line in lines(path)}
    assert letters >= (set("rsb") if windows else set("ka"))
    outcome = replayed(path)
    again = outcome.stats
    assert (outcome.tokens_asked, outcome.tokens_found) == (stats.prefix_queries, stats.prefix_hits)
    assert outcome.cow_copies == stats.cow_copies
    assert (outcome.refused, outcome.evicted) == (0, 0)
    names = ["blocks_used", "blocks_cached", "blocks_shared", "table_entries", "tables"]
    assert [getattr(again, name) for name in names] == [getattr(stats, name) for name in names]
    assert used_rows(again) == used_rows(stats)
    assert again.bytes_allocated == stats.bytes_allocated
    block_bytes = sum(group.block_bytes for group in pool.groups)
    for other in ({"max_bytes": 40 * block_bytes}, {"page_size": 64}, {"page_size": 512}):
        replayed(path, **other)


def test_a_trace_of_rings_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, windows={0: Window(200, 57)}, max_bytes=1 << 20, trace=str(path))
    prefixes = PrefixCache(pool, has_states=False)
    first = prefixes.fetch("", [5] * 300, FORMAT).sequence
    write(new_caches(pool, first), 250)
    write(new_caches(pool, first), 50)
    prefixes.insert("", [5] * 300, first, None)
    second = prefixes.fetch("", [5] * 280, FORMAT).sequence
    write(new_caches(pool, second), 1)
    del first
    gc.collect()
    pool.clear()
    flush(pool)
    assert lines(path) == [
        "P 0 0 1048576 pool",
        "l 0 300 0",
        "B 0 8192 fp16",
        "G 0 0 1 0 200 0",
        "n 0 0 fp16",
        "w 0 0 250 1",
        # One step fills the page and overwrites it, so the ring never holds it.
        "w 0 250 300 0",
        "s 0 0 fp16",
        "r 1 0 0",
        "l 0 280 279",
        "n 1 0 fp16",
        "b 1 279 1",
        "c 1 1",
        "w 1 279 280 0",
        "u 0",
        "u 1",
        "d 0",
    ]
    stats = replayed(path).stats
    assert (stats.blocks_used, stats.blocks_cached, stats.prefix_hits) == (1, 0, 279)


def test_what_a_smaller_budget_would_have_changed(tmp_path: Path) -> None:
    """Three prompts that repeat, with room for two of them."""
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, trace=str(path))
    prefixes = PrefixCache(pool, has_states=False)
    write(new_caches(pool), 1)
    gc.collect()
    for _ in range(2):
        for number in range(3):
            tokens = [number] * 1024 + [9]
            prefix = prefixes.fetch("", tokens, FORMAT)
            caches = new_caches(pool, prefix.sequence if prefix else None)
            write(caches, 1025 - (prefix.num_tokens if prefix else 0))
            prefixes.insert("", tokens, caches[0].sequences[0], None)
            del caches, prefix
            gc.collect()
    flush(pool)
    recorded = replayed(path)
    assert (recorded.tokens_asked, recorded.tokens_found, recorded.evicted) == (6150, 3072, 0)
    block_bytes = pool.groups[0].allocator.formats[0].block_bytes
    smaller = replayed(path, max_bytes=10 * block_bytes)
    assert (smaller.tokens_found, smaller.refused) == (1024, 0)
    assert smaller.evicted > 0
    assert smaller.peak_mapped <= 10 * block_bytes < recorded.peak_mapped
    assert replayed(path, keeps_prefixes=False).tokens_found == 0
    tiny = replayed(path, max_bytes=2 * block_bytes)
    assert tiny.refused == 6


def test_smaller_pages_waste_less_and_find_what_they_did(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    synthesize(Load(24, 100, 2000), TOKEN_BYTES, 10**9, path)
    waste = [replayed(path, page_size=size).fragmentation_at_peak for size in (16, 64, 256, 1024)]
    assert waste == sorted(waste)
    assert waste[0] < 0.01
    assert waste[3] > 0.25


def test_one_sequence_by_hand(tmp_path: Path) -> None:
    # 1,025 tokens take 5 pages, each in a slab that its step mapped.
    path = tmp_path / "trace"
    synthesize(Load(1, 1025, 1025, churn=0), TOKEN_BYTES, 10**9, path)
    outcome = replayed(path)
    assert (outcome.stats.slabs, outcome.stats.blocks_used) == (5, 5)
    assert outcome.peak_mapped == 5 * 256 * TOKEN_BYTES
    assert outcome.peak_allocated == 1025 * TOKEN_BYTES
    assert outcome.fragmentation_at_peak == pytest.approx(255 / 1280)


@pytest.mark.parametrize("seed", plain_only([0], range(3)))
def test_mean_waste_is_half_a_page(tmp_path: Path, seed: int) -> None:
    # 200 sequences: the mean of uniform 0 to 255 has a standard deviation of 5.2.
    path = tmp_path / "trace"
    synthesize(Load(200, 1, 1280, churn=0.5, seed=seed), TOKEN_BYTES, 10**9, path)
    stats = replayed(path).stats
    assert stats.tables == 200
    assert stats.bytes_last_block / TOKEN_BYTES / 200 == pytest.approx(127.5, abs=16)


def test_a_seed_always_gives_the_same(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((7, 7, 8)):
        path = tmp_path / f"trace{number}"
        synthesize(Load(50, 1, 3000, seed=seed), TOKEN_BYTES, 10**9, path)
        texts.append(path.read_text().split("\n", 1)[1])
    assert texts[0] == texts[1] != texts[2]


def test_replay_prints_both_and_what_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    path = str(tmp_path / "trace")
    assert main(["trace", "synthesize", path, "--sequences", "8", "--lengths", "300"]) == 0
    assert main(["trace", "replay", path]) == 0
    assert "as recorded" in capsys.readouterr().out
    assert main(["trace", "replay", path, "--max-kv-bytes", "100MB", "--page-size", "16"]) == 0
    table = capsys.readouterr().out
    assert "100.00 MB, 16 tokens a page" in table
    (refused,) = [line for line in table.splitlines() if "refused" in line]
    assert refused.split()[-2:] == ["0", "10"]
    assert main(["trace", "replay", path, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert content["recorded"] == content["replayed"]
    # 32 layers, keys and values, 8 heads of 128 numbers of 2 bytes.
    assert content["recorded"]["peak_allocated"] == 8 * 300 * 32 * 2 * 8 * 128 * 2
    assert main(["stats", path]) == 0
    assert "block tables 8" in capsys.readouterr().out


def test_plot_of_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "trace", tmp_path / "out.svg"
    synthesize(Load(20, 100, 2000), TOKEN_BYTES, 10**9, path)
    assert main(["stats", str(path), "--plot", str(out)]) == 0
    assert out.read_text().startswith("<?xml")


def test_every_process_records_where_the_environment_says(tmp_path: Path) -> None:
    script = (
        "import mlx.core as mx, os\n"
        "from paged_kv import *\n"
        "pool = PagePool(1, max_bytes=1 << 20)\n"
        "sequence = Sequence(pool)\n"
        "PagedKVCache(pool, 0, [sequence]).update_and_fetch(*[mx.zeros((1, 1, 300, 4))] * 2)\n"
        "PagedKVCache(pool, 0, [sequence]).update_and_fetch(*[mx.zeros((1, 1, 1, 4))] * 2)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sequence.trim(0, 100)\n"
        "    raise SystemExit\n"
        "os.waitpid(child, 0)\n"
        "print(os.getpid())\n"
    )
    named = str(tmp_path / "trace-%p")
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PATH": "", "PAGED_KV_TRACE": named, "PAGED_KV_PUBLISH": "0"},
    )
    (path,) = tmp_path.iterdir()
    assert path.name == f"trace-{done.stdout.strip()}"
    found = lines(path)
    assert "w 0 0 300 2" in found
    assert "w 0 300 301 0" in found, "the end of the process has lost a write"
    assert "t 0 201" not in found


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = PagePool(1, max_bytes=1 << 20, trace=str(tmp_path / "trace"))
    caches = new_caches(pool)
    write(caches, 100)
    events: Any = pool.counts.events
    assert pool.stats().traces_stopped == 0
    events.file._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115  # the trace closes it
    fork = copy.deepcopy(caches)
    write(fork, 1)
    events.arrived("request", 300, 10)
    events.shares("request", [1] * 300, None)
    events.begun("request")
    events.ended("request")
    pool.check()
    assert [cache.offset for cache in (*caches, *fork)] == [100, 101]
    assert pool.stats().traces_stopped == 1
    said = [record.getMessage() for record in caplog.records if "ends here" in record.getMessage()]
    assert len(said) == 1
    assert "No space left" in said[0]
    assert "trace=" in said[0], "what to change"


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PagePool(1, max_bytes=1 << 20, trace=str(tmp_path / "no" / "folder"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no trace of version 1"),
        ("{}", "is no trace of version 1"),
        ('{"paged_kv_trace": 99}', "is no trace of version 1"),
        ('{"paged_kv_trace": 1}\nz 1\n', "line 2 of the trace makes no sense: z 1"),
        ('{"paged_kv_trace": 1}\n+ 3\nn 0 0 fp16\n', "line 3 of the trace makes no sense"),
        ('{"paged_kv_trace": 1}\nP 0 0\n', "line 2 of the trace makes no sense"),
    ],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert main(["trace", "replay", str(path)]) == 1
    assert message in capsys.readouterr().err


def test_a_line_is_added_with_the_time_that_has_passed(tmp_path: Path) -> None:
    times = iter([5.0, 5.0, 5.25, 5.2509765625, 7.0])
    file = TraceFile(tmp_path / "trace", lambda: next(times))
    for number in range(4):
        file.line(TraceEvent.DROP, number)
    file.flush()
    text = (tmp_path / "trace").read_text().splitlines()[1:]
    assert text == ["d 0", "+ 250", "d 1", "d 2", "+ 1750", "d 3"]


@pytest.mark.parametrize(
    ("flag", "value", "example"),
    [
        ("--max-kv-bytes", "10GBB", "'10GBB' is not a size; write one like 512MB, 4GB or 1.5GiB"),
        ("--max-kv-bytes", "0", "like 512MB"),
        ("--sequences", "0", "such as 8"),
        ("--layers", "-1", "such as 8"),
        ("--lengths", "2000,100", "such as 100,2000"),
        ("--lengths", "0", "such as 100,2000"),
        ("--lengths", "1,2,3", "like 100,2000"),
        ("--lengths", "many", "like 100,2000"),
        ("--churn", "1.5", "such as 0.5"),
        ("--churn", "nan", "such as 0.5"),
    ],
)
def test_bad_arguments_exit_with_2_and_an_example(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, example: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["trace", "synthesize", "unused", f"{flag}={value}"])
    assert exit_info.value.code == 2
    assert example in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512MB", 512_000_000),
        ("4GB", 4_000_000_000),
        ("4g", 4_000_000_000),
        ("2 TB", 2_000_000_000_000),
        ("1.5GiB", 1_610_612_736),
        ("0.1GB", 100_000_000),
        ("1KiB", 1024),
        ("12b", 12),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "10GBB", "-1GB", "1e9", "1.GB", "4iB", "0.5", "٤GB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="like 512MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (8_590_000_000, "8.59 GB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
