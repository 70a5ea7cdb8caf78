"""A trace tells which requests were served, and how many would have run with another policy."""

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from paged_kv.command_line import main
from paged_kv.trace.admission_replay import replay_admission
from paged_kv.trace.replay import read_trace
from paged_kv.trace.requests import TracedLoad
from tests.support.folders import MODEL_FOLDERS
from tests.support.grids import plain_only
from tests.support.running_server import PagedRunningServer, paged_server, with_small_model
from tests.support.zoo import small_model

HEADER = '{"paged_kv_trace": 1, "page_size": 256, "time": 0}'
POOL = ["P 0 0 8000 llama", "B 0 1000 fp16", "G 0 0 0 0 0 0"]


def trace(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([HEADER, *POOL, *lines]) + "\n")
    return path


def served(number: int, prompt: int, answer: int, most: int = 600) -> list[str]:
    """A request that takes 10 ms for its prompt, and as long for each token."""
    arrives = [f"q {number} 0 {prompt} {most}", f"i {number}"]
    return [*arrives, f"+ {10 * (answer + 1)}", f"o {number} {answer}"]


def load(path: Path) -> TracedLoad:
    return TracedLoad(read_trace(path), 256)


def test_requests_are_those_that_a_batch_has_told(tmp_path: Path) -> None:
    lines = [*served(0, 200, 50), "+ 1000", *served(1, 300, 20, most=30), "+ 5", "q 2 0 9 40"]
    found = load(trace(tmp_path / "trace", *lines))
    assert [(r.prompt, r.answer, r.most, r.arrives) for r in found.requests] == [
        (200, 50, 600, 0),
        (300, 20, 30, 1510),
        # It has not ended, and may still generate all.
        (9, 40, 40, 1725),
    ]
    assert found.step_ms(2048) == 10
    assert (found.running_most, found.preemptions) == (1, 0)


def test_a_preempted_request_is_one_request(tmp_path: Path) -> None:
    lines = ["q 0 0 200 9", "q 1 0 200 9", "i 0", "i 1", "p 1", "o 0 9", "i 1", "o 1 9"]
    found = load(trace(tmp_path / "trace", *lines))
    assert (len(found.requests), found.running_most, found.preemptions) == (2, 2, 1)


def test_optimistic_admission_runs_more_at_once(tmp_path: Path) -> None:
    """8 blocks. Each request takes 1, and may take 4."""
    together = [line for number in range(6) for line in served(number, 200, 50)]
    found = load(
        trace(tmp_path / "trace", *sorted(together, key=lambda line: "qi+o".index(line[0])))
    )
    reserve = replay_admission(found, "reserve")
    optimistic = replay_admission(found, "optimistic")
    assert (reserve.requests, reserve.impossible) == (6, 0)
    assert (reserve.running_most, optimistic.running_most) == (2, 6)
    assert reserve.running_mean < optimistic.running_mean
    assert (reserve.preemptions, optimistic.preemptions) == (0, 0)
    assert replay_admission(found, "optimistic", max_bytes=3000).impossible == 6


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(trace(tmp_path / "trace", *served(0, 200, 50)))
    command = ["trace", "replay", path, "--admission", "reserve", "--max-tokens", "1000"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for part in ("as recorded", "reserve, max_tokens 1,000", "running at once, at most"):
        assert part in shown
    (requests,) = [line for line in shown.splitlines() if line.startswith("requests ")]
    assert requests.split() == ["requests", "1", "1"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["admission"]["running_most"] == 1


def test_a_trace_without_requests_says_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(trace(tmp_path / "trace", "n 0 0 fp16", "w 0 0 300 2"))
    assert main(["trace", "replay", path, "--admission", "reserve"]) == 1
    assert "has none: record a trace of `paged-kv server`" in capsys.readouterr().err


@pytest.mark.parametrize(("page_size", "least"), [(256, 1000), (16, 63)])
def test_a_budget_that_holds_no_page_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page_size: int, least: int
) -> None:
    path = str(trace(tmp_path / "trace", *served(0, 200, 50)))
    command = ["trace", "replay", path, "--page-size", str(page_size), "--max-kv-bytes"]
    assert main([*command, str(least - 1)]) == 1
    said = capsys.readouterr().err
    assert f"--max-kv-bytes {least - 1} holds no page: {page_size} tokens take {least:,}" in said
    assert main([*command, str(least)]) == 0


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # without a window, and with one
@pytest.mark.parametrize("seed", plain_only([3], range(20)))
def test_a_replay_of_a_batch_comes_to_the_recorded_counts(
    tmp_path: Path, family: str, seed: int
) -> None:
    """Random lengths in few blocks: of seed 3, a request without a window is preempted."""
    path = tmp_path / "trace"
    model, rng = small_model(family), random.Random(seed)
    count, blocks = rng.randrange(2, 8), rng.randrange(4, 12)
    lengths = [(rng.randrange(20, 700), rng.randrange(5, 400)) for _ in range(count)]
    fitting = [(prompt, min(most, blocks * 256 - prompt - 2)) for prompt, most in lengths]
    prompts = [[rng.randrange(1, 60) for _ in range(prompt)] for prompt, _ in fitting]
    factory = PagedCacheFactory(model, max_bytes=blocks * block_bytes(model), trace=path)
    with factory, closing(BatchGenerator(model)) as generator:
        generator.insert(prompts, max_tokens=[most for _, most in fitting])
        while generator.next_generated():
            pass
    stats = factory.stats()
    events: Any = factory.pool.counts.events
    events.flush()
    recorded = load(path)
    outcome = replay_admission(recorded, "optimistic")
    assert len(recorded.requests) == outcome.requests == count
    assert recorded.preemptions == outcome.preemptions == stats.preemptions
    assert outcome.tokens_recomputed == stats.tokens_recomputed
    assert recorded.running_most == outcome.running_most
    assert outcome.preemptions or (family, seed) != ("qwen3", 3)
    factory.close()


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_a_replay_of_a_server_comes_to_the_recorded_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admission: str
) -> None:
    """6 requests that together have room at first, and not with all their answers."""
    monkeypatch.setenv("PAGED_KV_TRACE", str(tmp_path / "trace"))
    with with_small_model():
        options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--admission", admission]
        memory = str(8 * block_bytes(small_model("llama")))
        with paged_server(*options, "--max-kv-bytes", memory) as running:
            running.hold_until_submitted(6)
            with ThreadPoolExecutor(6) as clients:
                list(clients.map(lambda number: ask(running, number), range(6)))
            running.wait_until_idle()
            (pool,) = running.pools
            events: Any = pool.counts.events
            events.flush()
    recorded = load(tmp_path / "trace")
    outcome = replay_admission(recorded, admission)
    assert len(recorded.requests) == outcome.requests == 6
    assert recorded.running_most == outcome.running_most
    assert recorded.preemptions == outcome.preemptions
    assert (recorded.running_most == 6) == (admission == "optimistic")
    assert all(each.ends is not None for each in recorded.requests)


def test_a_replay_counts_shared_pages_once_as_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind two common pages 5 requests fit that otherwise would be 3."""
    monkeypatch.setenv("PAGED_KV_TRACE", str(tmp_path / "trace"))
    with with_small_model():
        memory = str(11 * block_bytes(small_model("llama")))
        options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", memory]
        with paged_server(*options) as running:
            running.hold_until_submitted(5)
            with ThreadPoolExecutor(5) as clients:
                list(clients.map(lambda number: ask(running, number, [3] * 512), range(5)))
            running.wait_until_idle()
            (pool,) = running.pools
            events: Any = pool.counts.events
            events.flush()
    recorded = load(tmp_path / "trace")
    assert [run.first for run in recorded.requests[-1].runs] == [0]
    assert recorded.requests[-1].runs[0].owner == 0
    outcome = replay_admission(recorded, "optimistic")
    assert recorded.running_most == outcome.running_most == 5
    assert recorded.preemptions == outcome.preemptions == 0


def test_requests_share_what_running_ones_hold(tmp_path: Path) -> None:
    """8 blocks: the second request shares 4 of 5, and the third, of another prompt, none."""
    lines = [*served(0, 1100, 100), *served(1, 1100, 100), "h 1 0 4", *served(2, 1100, 100)]
    order = sorted(lines, key=lambda line: "qhi+o".index(line[0]))
    outcome = replay_admission(load(trace(tmp_path / "trace", *order)), "optimistic")
    assert outcome.running_most == 2
    alone = [line for line in order if line[0] != "h"]
    outcome = replay_admission(load(trace(tmp_path / "alone", *alone)), "optimistic")
    assert outcome.running_most == 1


def ask(running: PagedRunningServer, number: int, before: Sequence[int] = ()) -> None:
    options: Any = {"logit_bias": {"0": -1000}}
    prompt = [*before, *[number + 5] * 100]
    running.client().completions.create(
        model="default_model", prompt=prompt, max_tokens=100 if before else 200, extra_body=options
    )


def block_bytes(model: Any) -> int:
    """Bytes of a block in all layers."""
    factory = PagedCacheFactory(model, max_bytes="1GB")
    factory.can_admit(0)
    return sum(group.block_bytes for group in factory.pool.groups)
