"""`paged-kv trace replay` says what prompts find with an eviction policy, and at most."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paged_kv.allocator.prefixes.eviction import (
    LEAST_WORTH,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)
from paged_kv.allocator.prefixes.uses import Use
from paged_kv.command_line import main
from paged_kv.trace.replay import Parameters, Replay, read_trace
from paged_kv.trace.request_lines import RequestLines, TracedMemory
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.reuse_replay import most_reuse, replay_reuse
from paged_kv.trace.state_replay import foreseen_states, replay_ranked_states

HEADER = '{"paged_kv_trace": 1, "page_size": 256, "time": 0}'
PAGES = 5
POLICIES: dict[str, EvictionPolicy] = {
    "lru": LeastRecentlyUsed(),
    "lfu": LeastFrequentlyUsed(),
    "fifo": FirstInFirstOut(),
    "worth": LEAST_WORTH,
}


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """A prompt of two pages that comes back, and others between that do not."""
    file = RequestLines(tmp_path / "trace", TracedMemory(1, PAGES * 256), "pool")
    for now, shared in enumerate([0, 0, 2, 0, 2, 0, 2, 0, 2, 0, 0, 0, 2, 0, 0, 2]):
        file.arrive(now, 513, 10, 0, shared)
    file.finish()
    return tmp_path / "trace"


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["trace", "replay", *map(str, arguments), "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.parametrize("name", POLICIES)
def test_the_policy_stands_beside_the_others(
    requests: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    load = TracedLoad(read_trace(requests), 256)
    found = replayed(capsys, requests, "--eviction", name)["reuse"]
    assert found.keys() == {name, "lru", "most"}
    for key, reuse in (
        (name, replay_reuse(load, POLICIES[name])),
        ("lru", replay_reuse(load, LeastRecentlyUsed())),
        ("most", most_reuse(load)),
    ):
        assert found[key] == vars(reuse) | {"share": reuse.share}
    assert found["most"]["capacity"] == PAGES
    assert found["lru"]["share"] < found["most"]["share"]


def test_policies_differ_here(requests: Path) -> None:
    """Else the test above would pass if all of them were the same one."""
    load = TracedLoad(read_trace(requests), 256)
    found = {name: replay_reuse(load, policy).tokens_found for name, policy in POLICIES.items()}
    assert found["fifo"] < found["lru"] < found["lfu"]


def test_worth_is_the_default(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, requests)
    assert found["reuse"].keys() == {"worth", "lru", "most"}
    assert found["recorded"] == found["replayed"]


def test_a_budget_counts(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, requests, "--max-kv-bytes", "256000")["reuse"]
    assert {each["capacity"] for each in found.values()} == {1000}
    assert {each["tokens_found"] for each in found.values()} == {6 * 512}


def test_where_nothing_is_kept_no_policy_is_shown(
    requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replayed(capsys, requests, "--eviction", "always")["reuse"].keys() == {"lru", "most"}


def test_states_stand_beside_pages(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = TracedLoad(read_trace(requests), 256)
    found = replayed(capsys, requests, "--states", 2)["states"]
    assert found.keys() == {"worth", "lru", "foreseen"}
    for key, reuse in (
        ("worth", replay_ranked_states(load, 2, LEAST_WORTH)),
        ("lru", replay_ranked_states(load, 2, LeastRecentlyUsed())),
        ("foreseen", foreseen_states(load, 2)),
    ):
        assert found[key] == vars(reuse) | {"share": reuse.share}
    assert (found["lru"]["capacity"], found["lru"]["tokens_asked"]) == (2, 16 * 513)
    assert found["foreseen"]["tokens_found"] == 6 * 512
    assert main(["trace", "replay", str(requests), "--states", "2"]) == 0
    shown = capsys.readouterr().out
    assert "states, by eviction policy" in shown
    assert "with foresight" in shown


def test_a_trace_of_requests_only_prints_these(
    requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "replay", str(requests), "--admission", "optimistic"]) == 0
    shown = capsys.readouterr().out
    assert "block tables" not in shown
    rows = {line.split("  ")[0]: line.split()[-3:] for line in shown.splitlines() if line}
    assert rows["pages, by eviction policy"] == ["lru", "most", "possible"]
    assert rows["tokens of prompts"] == ["8,208"] * 3
    assert "running at once, at most" in rows


def test_a_trace_of_tables_without_requests_prints_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [HEADER, "P 0 0 8000 llama", "B 0 1000 fp16", "G 0 0 0 0 0 0", "n 0 0 fp16"]
    (tmp_path / "trace").write_text("\n".join([*lines, "w 0 0 300 2"]) + "\n")
    assert main(["trace", "replay", str(tmp_path / "trace"), "--eviction", "lru"]) == 0
    shown = capsys.readouterr().out
    assert "block tables" in shown
    assert "evicts lru" in shown
    assert "by eviction policy" not in shown
    assert "reuse" not in replayed(capsys, tmp_path / "trace")


@dataclass(frozen=True)
class Asked:
    """A policy that notes what it is asked."""

    uses: list[Use]

    def rank(self, use: Use) -> float:
        self.uses.append(use)
        return 0


def test_a_replay_of_tables_asks_the_policy(tmp_path: Path) -> None:
    lines = ["P 0 0 8000 llama", "B 0 1000 fp16", "G 0 0 0 0 0 0", "n 0 0 fp16", "w 0 0 300 2"]
    (tmp_path / "trace").write_text("\n".join([HEADER, *lines, "k 0 300 0 2"]) + "\n")
    policy = Asked([])
    Replay(read_trace(tmp_path / "trace"), Parameters(policy=policy)).run()
    assert policy.uses
