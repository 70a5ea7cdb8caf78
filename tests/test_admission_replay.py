"""A trace tells which requests were served, and how many would have run with another policy."""

import json
from pathlib import Path

import pytest

from paged_kv.command_line import main
from paged_kv.trace.admission_replay import replay_admission
from paged_kv.trace.replay import read_trace
from paged_kv.trace.requests import TracedLoad

HEADER = '{"paged_kv_trace": 1, "page_size": 256, "time": 0}'
POOL = ["P 0 0 8000 llama", "B 0 1000 fp16", "G 0 0 0 0 0 0"]


def trace(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([HEADER, *POOL, *lines]) + "\n")
    return path


def served(table: int, prompt: int, answer: int) -> list[str]:
    """A request whose tokens take 10 ms each."""
    lines = [f"n {table} 0 fp16", f"w {table} 0 {prompt} 1"]
    for at in range(prompt, prompt + answer, 10):
        lines += ["+ 100", f"w {table} {at} {at + 10} 0"]
    return [*lines, f"d {table}"]


def load(path: Path) -> TracedLoad:
    return TracedLoad(read_trace(path), 256)


def test_prompts_and_answers_are_told_apart(tmp_path: Path) -> None:
    found = load(trace(tmp_path / "trace", *served(0, 200, 50), "+ 1000", *served(1, 300, 20)))
    assert [(each.prompt, each.answer, each.arrives) for each in found.requests] == [
        (200, 50, 0),
        (300, 20, 1500),
    ]
    # The first ten tokens come with the first write.
    assert found.step_ms == pytest.approx((400 / 50 + 100 / 20) / 2)


def test_a_chain_of_forks_is_one_request_and_a_second_branch_another(tmp_path: Path) -> None:
    """As a batch forks a table when the sequence joins it, and as two samples share a prompt."""
    chain = ["n 0 0 fp16", "w 0 0 200 1", "f 0 1", "d 0", "w 1 200 210 0", "f 1 2", "w 1 210 215 0"]
    found = load(trace(tmp_path / "trace", *chain, "w 2 210 212 1"))
    assert [(each.prompt, each.answer) for each in found.requests] == [(200, 15), (210, 2)]


def test_a_trimmed_write_and_a_cached_prefix(tmp_path: Path) -> None:
    lines = [
        "n 0 0 fp16",
        "a 0 100 0",
        "w 0 100 200 1",
        "w 0 200 210 0",
        "t 0 205",
        "w 0 205 206 0",
    ]
    found = load(trace(tmp_path / "trace", *lines))
    assert [(each.prompt, each.answer) for each in found.requests] == [(200, 6)]


def test_optimistic_admission_runs_more_at_once(tmp_path: Path) -> None:
    """8 blocks. Each request takes 1, and may take 4."""
    together = [line for table in range(6) for line in served(table, 200, 50)]
    found = load(trace(tmp_path / "trace", *[line for line in together if line[0] != "+"], "+ 1"))
    reserve = replay_admission(found, "reserve", 600)
    optimistic = replay_admission(found, "optimistic", 600)
    assert (reserve.requests, reserve.impossible) == (6, 0)
    assert (reserve.running_most, optimistic.running_most) == (2, 6)
    assert reserve.running_mean < optimistic.running_mean
    assert (reserve.preemptions, optimistic.preemptions) == (0, 0)
    assert replay_admission(found, "optimistic", 600, max_bytes=3000).impossible == 6


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(trace(tmp_path / "trace", *served(0, 200, 50)))
    command = ["trace", "replay", path, "--admission", "reserve", "--max-tokens", "1000"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for part in ("as recorded", "reserve, max_tokens 1,000", "running at once, at most"):
        assert part in shown
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["admission"]["running_most"] == 1
