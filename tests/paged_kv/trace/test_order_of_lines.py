"""The order of a trace's lines."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagePool, Sequence
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.steps.batch import Batch
from paged_kv.trace import recorder
from paged_kv.trace.replay import IGNORED, Replay


def write(sequence: Sequence, count: int) -> None:
    numbers = mx.zeros((1, 1, count, 4))
    Batch.of(sequence.pool, [sequence]).append(0, numbers, numbers)


def lines(pool: PagePool, path: Path) -> list[str]:
    events: Any = pool.counts.events
    events.flush()
    return [line for line in path.read_text().splitlines()[1:] if not line.startswith("+")]


def test_each_event_is_described_once_and_replayed() -> None:
    described = re.findall(r"^    (\S) \w", str(recorder.__doc__), re.MULTILINE)
    assert sorted(described) == sorted(recorder.TraceEvent)
    replayed = {event for event in recorder.TraceEvent if hasattr(Replay, f"_{event.name.lower()}")}
    assert replayed.isdisjoint(IGNORED)
    assert replayed | IGNORED == set(recorder.TraceEvent)


def test_small_writes_are_told_before_what_takes_them_back(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, trace=str(path))
    sequence = Sequence(pool)
    for count in (300, 1, 1):
        write(sequence, count)
    sequence.trim(0, 50)
    write(sequence, 1)
    expected = ["w 0 0 300 2", "w 0 300 302 0", "t 0 252", "w 0 252 253 0"]
    assert lines(pool, path)[-4:] == expected


@pytest.mark.parametrize("is_moved", [False, True])
def test_each_block_of_a_prefix_that_goes_is_told(tmp_path: Path, is_moved: bool) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, trace=str(path))
    prefixes = PrefixCache(pool, has_states=False)
    sequence = Sequence(pool)
    write(sequence, 300)
    prefixes.insert("", list(range(300)), sequence, None)
    del sequence
    assert pool.stats().blocks_cached == 2
    if is_moved:
        allocator = pool.groups[0].allocator
        allocator.ensure_free({"fp16": 1})
        allocator.apply_moves({0: allocator.formats[0].free[0]})
    pool.clear()
    assert lines(pool, path)[-2:] == ["e 0 1", "e 0 1"]


def test_prompts_that_begin_alike_are_told_unless_their_salts_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    pool = PagePool(1, max_bytes=1 << 20, trace=str(path))
    events: Any = pool.counts.events

    def arrive(name: str, prompt: list[int], salt: str = "") -> list[str]:
        events.arrived(name, len(prompt), 5)
        events.shares(name, prompt, salt)
        return [line for line in lines(pool, path) if line.startswith("h")][-1:]

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
