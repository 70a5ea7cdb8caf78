"""A replay comes to what was recorded, and answers what another budget or format would change."""

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from paged_kv.allocator.prefixes.eviction import LeastFrequentlyUsed, LeastRecentlyUsed
from paged_kv.command_line import main
from paged_kv.integrations.replay.replay import Outcome, replay
from paged_kv.trace import Trace, TracedLayers, TracedRequest, read_trace
from tests.support.folders import ROOT
from tests.support.zoo import small_model

LAYERS = TracedLayers(8, 128, 8, 128, "float16", count=2)
# Bytes of a block of all layers in 16 bits.
BLOCK = 256 * 2 * 2 * 8 * 128 * 2


def served(trace: Trace, blocks: float, page_format: str = "fp16") -> Outcome:
    return replay(trace, int(blocks * BLOCK), page_format)


def trace_of(*requests: tuple[int, int, int, list[int]]) -> Trace:
    """A trace of requests: when they arrive, their tokens, and their ids."""
    return Trace(
        [TracedRequest(number, *each, block_size=256) for number, each in enumerate(requests)],
        [LAYERS],
    )


# Llama has no window here, and Gemma has layers with one.
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_a_replay_comes_to_what_was_recorded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, one that begins alike, and one that continues the first answer; one at a time, and
    two at once in too few blocks."""
    monkeypatch.setenv("PAGED_KV_TRACE", str(tmp_path / "trace"))
    model = small_model(family)
    factory = PagedCacheFactory(model, max_bytes="64MB")
    first = [*range(1, 50)] * 12
    with factory, closing(BatchGenerator(model)) as generator:
        tokens = _ended(generator, factory, first, 300)
        _ended(generator, factory, [*first[:512], *[7] * 30], 2)
        _ended(generator, factory, [*tokens, 8], 2)
    trace = read_trace(tmp_path / "trace")
    assert [each.prompt_length for each in trace.requests] == [588, 542, len(tokens) + 1]
    assert [each.answer_length for each in trace.requests] == [300, 2, 2]
    spaced = [replace(each, arrives=1_000_000 * each.number) for each in trace.requests]
    again = replay(replace(trace, requests=spaced), 1 << 26, "fp16")
    assert again.served == 3
    # Behind full pages a replay knows no tokens.
    assert 0 <= factory.stats().prefix_hits - again.cached_tokens < 2 * 256
    assert again.cached_tokens >= 512 + len(tokens) - 256
    assert trace.decode_ms != 30, "the default"
    assert trace.prompt_ms != 1, "the default"


def _ended(generator: BatchGenerator, factory: Any, prompt: list[int], count: int) -> list[int]:
    """All tokens of a prompt and its answer, which are cached."""
    generator.insert([prompt], max_tokens=[count])
    while True:
        for response in generator.next_generated():
            if response.finish_reason is not None:
                factory.insert_cache(response.all_tokens, response.prompt_cache)
                return list(response.all_tokens)


def test_a_larger_budget_or_smaller_pages_let_more_requests_run() -> None:
    """Two of five blocks, which grow to six, share nothing."""
    trace = trace_of((0, 1200, 150, []), (0, 1200, 150, []))
    roomy, short, small = served(trace, 12), served(trace, 11), served(trace, 11, "q4")
    assert [each.served for each in (roomy, short, small)] == [2, 2, 2]
    assert [each.preemptions for each in (roomy, short, small)] == [0, 1, 0]
    assert [each.peak_bytes // BLOCK for each in (roomy, short, small)] == [12, 11, 5]
    assert short.seconds > roomy.seconds == small.seconds
    assert served(trace, 5).refused == 2


def test_a_policy_decides_what_is_found() -> None:
    """The first of four prompts comes twice, and once more behind the others."""
    pages = [[2 * number, 2 * number + 1] for number in (0, 0, 1, 2, 3, 0)]
    trace = trace_of(*[(100_000 * at, 600, 1, ids) for at, ids in enumerate(pages)])
    for policy, found in ((LeastRecentlyUsed(), 2), (LeastFrequentlyUsed(), 4)):
        assert replay(trace, 8 * BLOCK, "fp16", policy).cached_tokens == found * 256


def test_a_request_waits_for_what_another_computes() -> None:
    """Both have the same prompt, which takes three steps."""
    trace = trace_of((0, 5000, 10, [*range(19)]), (0, 5000, 10, [*range(19)]))
    outcome = served(trace, 50)
    assert outcome.cached_tokens == 19 * 256
    assert outcome.longest_wait_s == pytest.approx(5, abs=1)


def test_the_command_prints_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    path = tmp_path / "mooncake"
    path.write_text(f"{json.dumps(line)}\n" * 2)
    assert main(["trace", "replay", str(path)]) == 1
    assert "--max-kv-bytes" in capsys.readouterr().err
    command = ["trace", "replay", str(path), "--max-kv-bytes", "2GB", "--eviction", "lru"]
    assert main(command) == 0
    assert "requests served" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out).values()
    assert outcome["served"] == 2


@pytest.mark.slow
def test_a_program_records(tmp_path: Path) -> None:
    """As a process, which the command becomes."""
    trace = tmp_path / "trace"
    script = "import os, sys; print(os.environ['PAGED_KV_TRACE'], *sys.argv[1:])"
    command = [sys.executable, "-m", "paged_kv", "trace", "record", "trace", sys.executable]
    done = subprocess.run(
        [*command, "-c", script, "--max-kv-bytes", "1GB"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{trace} --max-kv-bytes 1GB\n"
