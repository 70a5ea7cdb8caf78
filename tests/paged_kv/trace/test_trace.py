"""Traces record events of blocks, and replays give the same results, or those of other
parameters."""

import copy
import gc
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.kernels.pages.page_format import page_format_named
from paged_kv.pool.window import Window
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.trace import recorder
from paged_kv.trace.recorder import TracedPool
from paged_kv.trace.replay import Outcome, Parameters, Replay, read_trace
from tests.support.folders import ROOT
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


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slow
def test_a_replay_comes_to_what_was_recorded(tmp_path: Path, seed: int) -> None:
    """Random use of forks, trims, drops, windows and prefixes."""
    path = tmp_path / "trace"
    rng = random.Random(seed)
    windows = {0: Window(300, 64, sink_tokens=4)} if seed % 2 else {}
    pool = PagePool(2, windows=windows, max_bytes=1 << 24, trace=str(path))
    prefixes = PrefixCache(pool, has_states=False)
    held: list[tuple[list[int], list[PagedKVCache]]] = []
    for _ in range(60):
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


@pytest.mark.parametrize("is_moved", [False, True])
def test_each_block_of_a_prefix_that_goes_is_told(tmp_path: Path, is_moved: bool) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, trace=str(path))
    prefixes = PrefixCache(pool, has_states=False)
    sequence = Sequence(pool)
    write(new_caches(pool, sequence), 300)
    prefixes.insert("", list(range(300)), sequence, None)
    del sequence
    assert pool.stats().blocks_cached == 2
    if is_moved:
        allocator = pool.groups[0].allocator
        allocator.ensure_free({"fp16": 1})
        allocator.apply_moves({0: allocator.formats[0].free[0]})
    pool.clear()
    flush(pool)
    assert lines(path)[-2:] == ["e 0 1", "e 0 1"]


def test_prompts_that_begin_alike_are_told_unless_their_salts_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, trace=str(path))
    events: Any = pool.counts.events

    def arrive(name: str, prompt: list[int], salt: str = "") -> list[str]:
        events.arrived(name, len(prompt), 5)
        events.shares(name, prompt, salt)
        flush(pool)
        return [line for line in lines(path) if line.startswith("h")][-1:]

    assert arrive("first", [1] * 700) == []
    assert arrive("another key's", [1] * 700, "key") == []
    assert arrive("a page", [*[1] * 400, *[2] * 300]) == ["h 2 0 1"]
    assert arrive("two pages", [1] * 513) == ["h 3 0 2"]
    # Its last token is computed, so its second page is not shared.
    assert arrive("a full page", [*[1] * 256, *[2] * 256])[-1:] == ["h 4 0 1"]
    monkeypatch.setattr(recorder, "MOST_PROMPT_PAGES", 2)
    assert arrive("first of many", [7] * 600) == ["h 4 0 1"]
    assert arrive("too late", [1] * 700) == ["h 4 0 1"]
    assert arrive("in time", [1] * 700) == ["h 7 6 2"]
    # As when it joins a batch.
    events.arrived("in time", 700, 5)
    flush(pool)
    assert sum(line.startswith("q") for line in lines(path)) == 8


@pytest.mark.slow
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
