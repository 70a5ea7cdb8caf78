"""What the next turn of a chat begins with is computed while no request is there."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.prefix.keeping import Unstored
from paged_kv.ranks import ALONE
from paged_kv.server.engine import next_turns
from paged_kv.server.engine.next_turns import (
    JUDGED,
    MOST_PREPARED,
    PIECE_TOKENS,
    NextTurn,
    NextTurns,
    is_on_battery,
)
from paged_kv.server.engine.prompt_fetcher import PromptReuse
from paged_kv.server.engine.server_metrics import ServerMetrics
from tests.support.tiny_model import tokens_of
from tests.support.zoo import small_model

TOKENS = tokens_of(1, 3 * PIECE_TOKENS + 40)
LOADED: Any = SimpleNamespace(key="m")


class Idle:
    """Next turns of a model that nobody asks."""

    def __init__(self, family: str = "llama", max_bytes: int = 1 << 24) -> None:
        self.model = small_model(family, vocab_size=512)
        self.factory = PagedCacheFactory(self.model, max_bytes=max_bytes)
        self.reuse = PromptReuse([self.factory])
        self.metrics = ServerMetrics()
        provider: Any = SimpleNamespace(
            options=SimpleNamespace(prepare_next="on"),
            ranks=ALONE,
            factories=[self.factory],
            model=self.model,
            reuse=self.reuse,
            described=LOADED,
        )
        self.turns = NextTurns(provider, self.metrics)

    def add(self, tokens: list[int] = TOKENS, salt: Any = None, **more: Any) -> None:
        turn = {"request_id": "r", "model": "m", "session": None, "read": lambda _: tokens}
        self.turns.add(NextTurn(salt=salt, **{**turn, **more}))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.turns.step(now=0.0)

    def run(self) -> None:
        while self.turns.has_work:
            self.step()

    def known(self, tokens: list[int] = TOKENS, salt: Any = None) -> int:
        return self.factory.peek([*tokens, 1], salt=salt).num_tokens

    def begin(self, tokens: list[int], cached: int, salt: Any = None) -> None:
        prompt = SimpleNamespace(tokens=tokens, media=None)
        job: Any = SimpleNamespace(prompt=prompt, cached_tokens=cached, salt=salt)
        self.turns.record_begun(job)


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> Idle:
    monkeypatch.setattr(next_turns, "is_on_battery", lambda: False)
    return Idle()


def test_a_request_waits_for_one_piece_whose_tokens_are_kept(idle: Idle) -> None:
    idle.add(salt=Unstored("a"))
    idle.step(3)  # reads, and computes two pieces
    idle.turns.pause()
    assert idle.known(salt="a") == 2 * PIECE_TOKENS
    assert not idle.known(salt="b")
    idle.run()
    assert idle.known(salt="a") == len(TOKENS) == idle.metrics.prepared_tokens


def test_no_part_of_a_page_is_prepared_for_reproducible_prompts(idle: Idle) -> None:
    idle.factory.pool.is_reproducible = True
    idle.add()
    idle.run()
    assert idle.metrics.prepared_tokens == 3 * PIECE_TOKENS == idle.known()


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
def test_states_and_windows_resume_behind_all_of_it(family: str) -> None:
    idle = Idle(family)
    idle.add()
    idle.step(2)
    idle.turns.pause()
    idle.run()
    prompt = [*TOKENS, 5, 6]
    cache, cached = idle.factory.fetch_cache(prompt)
    assert cached == len(TOKENS)
    found = idle.model(mx.array([prompt[cached:]]), cache=cache)[0, -1]
    fresh = idle.model(mx.array([prompt]), cache=idle.factory.make_cache())[0, -1]
    assert mx.allclose(found, fresh, atol=1e-4)


def test_it_evicts_only_what_is_worth_less() -> None:
    small = Idle(max_bytes=1 << 21)
    others = [tokens_of(number, PIECE_TOKENS) for number in range(2, 40)]
    for tokens in others:
        small.add(tokens)
        small.run()
    kept = [tokens for tokens in others if small.known(tokens)]
    assert 1 < len(kept) < len(others)
    assert kept[-1] == others[-1]
    for tokens in kept:
        for _ in range(3):
            small.factory.fetch_cache([*tokens, 1])
    small.add()
    small.run()
    assert not small.known()
    assert all(map(small.known, kept))


def test_ended_sessions_are_not_prepared(idle: Idle) -> None:
    idle.add(session="s", salt="a")
    idle.add(tokens_of(2, 300), session="s")
    idle.step(2)
    idle.turns.end_session("s", None)
    idle.factory.end_session("s")
    idle.run()
    assert not idle.known(tokens_of(2, 300))
    assert idle.known(salt="a") == len(TOKENS)


def test_what_cannot_be_prepared_is_given_up(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> list[int]:
        raise ValueError

    idle.add(model="other")
    idle.add(read=fails)
    idle.add([])
    monkeypatch.setattr(next_turns, "is_on_battery", lambda: True)
    idle.turns._asked_at = -100.0
    idle.add()
    idle.run()
    assert not idle.metrics.prepared_tokens


def test_what_later_prompts_find_is_counted(idle: Idle) -> None:
    known, half = TOKENS[:PIECE_TOKENS], len(TOKENS) // 2
    idle.add(known)
    idle.run()
    idle.add()
    idle.run()
    idle.begin([9, *TOKENS[1:]], cached=len(TOKENS))  # another beginning
    idle.begin([*TOKENS[:half], 9, 9], cached=half)  # of both
    idle.begin([*TOKENS, 9], cached=len(TOKENS))  # they count once
    counted = idle.metrics
    assert counted.prepared_tokens == len(TOKENS)
    assert counted.prepared_found == half
    assert counted.prepared_unused == len(TOKENS) - half


@pytest.mark.parametrize("finds", [True, False])
def test_it_stops_when_nothing_is_found(
    finds: bool, idle: Idle, caplog: pytest.LogCaptureFixture
) -> None:
    keep = idle.turns._keep
    for number in range(JUDGED + MOST_PREPARED):
        tokens, turn = tokens_of(number, 20), NextTurn("r", LOADED.key, None, None, lambda _: [])
        keep(turn, tokens, 0, idle.factory.fetch_cache(tokens)[0])
        if finds and number % 5 == 0:
            idle.begin([*tokens, 1], cached=20)
    assert idle.turns.is_on == finds
    assert ("any more" in caplog.text) != finds
    idle.add()
    assert idle.turns.has_work == finds


def test_the_system_says_when_the_battery_gives_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name, texts in {"AC": ("Mains", "", ""), "mouse": ("Battery", "Device", "")}.items():
        (tmp_path / name).mkdir()
        for field, text in zip(("type", "scope", "status"), texts, strict=True):
            (tmp_path / name / field).write_text(text or "Discharging\n")
    assert not is_on_battery(tmp_path)
    (tmp_path / "mouse" / "scope").unlink()
    assert is_on_battery(tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    for told in ("Battery Power", "AC Power"):
        answer = SimpleNamespace(stdout=f"Now drawing from '{told}'")
        monkeypatch.setattr(subprocess, "run", lambda *_, answer=answer, **__: answer)
        assert is_on_battery() == (told == "Battery Power")
