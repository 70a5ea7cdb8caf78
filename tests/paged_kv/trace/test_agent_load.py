"""Made-up agents have the lengths of published ones."""

from pathlib import Path
from statistics import median

import pytest

from paged_kv.command_line import main
from paged_kv.trace.replay import read_trace
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.shared_prompts import common_pages


def test_turns_continue_earlier_ones_and_a_seed_always_gives_the_same(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate(("7", "7", "8")):
        path = tmp_path / f"trace{number}"
        command = ["trace", "agents", str(path), "--agents", "8", "--requests", "1000"]
        assert main([*command, "--seed", seed]) == 0
        texts.append(path.read_text().split("\n", 1)[1])
    assert texts[0] == texts[1] != texts[2]
    events = read_trace(tmp_path / "trace0")
    like = {int(words[0]): int(words[1]) for letter, *words in events if letter == "h"}
    load = TracedLoad(events, 256)
    assert load.running_most <= 8
    assert median(each.answer for each in load.requests) == pytest.approx(444, rel=0.1)
    pairs = [(load.requests[like[number]], load.requests[number]) for number in like]
    assert sum(a.prompt for a, _ in pairs) / sum(b.prompt for _, b in pairs) > 0.9
    for before, after in pairs:
        # All full pages but the one with the last token, which each request computes itself.
        assert common_pages(before.runs, after.runs) == (before.prompt - 1) // 256
        assert before.ends is not None
        assert before.ends <= after.arrives
