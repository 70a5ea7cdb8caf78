"""Made-up agents have the lengths of published ones."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from paged_kv.command_line import main
from paged_kv.trace.agent_load import AgentLoad, write_agent_load
from paged_kv.trace.replay import read_trace
from paged_kv.trace.request_lines import TracedMemory
from paged_kv.trace.requests import TracedLoad, TracedRequest
from paged_kv.trace.shared_prompts import common_pages

MEMORY = TracedMemory(1000, 10**9)


@dataclass
class Turn:
    """A request, and the number of the one that it begins like."""

    request: TracedRequest
    like: int | None


def turns(path: Path, load: AgentLoad) -> list[Turn]:
    write_agent_load(load, MEMORY, path)
    events = read_trace(path)
    like = {int(words[0]): int(words[1]) for letter, *words in events if letter == "h"}
    requests = TracedLoad(events, 256).requests
    return [Turn(request, like.get(number)) for number, request in enumerate(requests)]


def conversations(found: list[Turn]) -> tuple[list[list[int]], list[list[int]]]:
    """The turns of each session, and those of each sub-agent: of two turns that begin like one
    request, the earlier is a sub-agent's, for which the other waits."""
    after: dict[int, list[int]] = {}
    for number, turn in enumerate(found):
        if turn.like is not None:
            after.setdefault(turn.like, []).append(number)

    def from_turn(number: int) -> list[int]:
        path = [number]
        while path[-1] in after:
            path.append(after[path[-1]][-1])
        return path

    sessions = [from_turn(number) for number, turn in enumerate(found) if turn.like is None]
    branches = [from_turn(firsts[0]) for firsts in after.values() if len(firsts) == 2]
    assert max(map(len, after.values())) == 2
    return sessions, branches


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """About 200 sessions, the last ones of which do not end."""
    return turns(tmp_path_factory.mktemp("agents") / "trace", AgentLoad(8, 12_000))


def test_lengths_have_the_published_medians(many: list[Turn]) -> None:
    sessions, branches = conversations(many)
    ended = sessions[:-20]
    assert len(ended) > 150
    assert median(map(len, ended)) == pytest.approx(43, rel=0.1)
    last = [many[session[-1]].request.prompt for session in ended]
    assert median(last) == pytest.approx(142_000, rel=0.1)
    assert median(turn.request.answer for turn in many) == pytest.approx(444, rel=0.05)
    assert len(branches) / len(sessions) == pytest.approx(0.44, abs=0.06)


def test_more_than_96_percent_of_prompts_are_those_of_the_turn_before(many: list[Turn]) -> None:
    sessions, _ = conversations(many)
    pairs = [(many[a].request, many[b].request) for each in sessions for a, b in pairwise(each)]
    assert sum(a.prompt for a, _ in pairs) / sum(b.prompt for _, b in pairs) > 0.96
    for before, after in pairs:
        # All full pages but the one with the last token, which each request computes itself.
        assert common_pages(before.runs, after.runs) == (before.prompt - 1) // 256
        assert after.prompt > before.prompt + before.answer


def test_a_session_has_one_turn_at_a_time(many: list[Turn]) -> None:
    sessions, branches = conversations(many)
    for each in (*sessions, *branches):
        for a, b in pairwise(each):
            before, after = many[a].request, many[b].request
            assert before.ends is not None
            assert before.ends <= after.arrives


def test_a_parent_waits_for_its_sub_agent(many: list[Turn]) -> None:
    _, branches = conversations(many)
    last_like = {turn.like: turn.request for turn in many}
    for branch in branches:
        first, last = many[branch[0]], many[branch[-1]]
        assert last.request.ends is not None
        assert last_like[first.like].arrives >= last.request.ends


def test_so_many_sessions_run_at_once(tmp_path: Path) -> None:
    found = turns(tmp_path / "trace", AgentLoad(3, 300))
    assert len(found) == 300
    assert [turn.like for turn in found[:3]] == [None] * 3
    events = read_trace(tmp_path / "trace")
    assert TracedLoad(events, 256).running_most == 3


def test_a_seed_always_gives_the_same(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate(("7", "7", "8")):
        path = tmp_path / f"trace{number}"
        command = ["trace", "agents", str(path), "--agents", "2", "--requests", "99"]
        assert main([*command, "--seed", seed]) == 0
        texts.append(path.read_text().split("\n", 1)[1])
    assert texts[0] == texts[1] != texts[2]
    # 32 layers, keys and values, 8 heads of 128 numbers of 2 bytes, and 256 tokens.
    assert "B 0 33554432 fp16\n" in texts[0]
