"""The log says why a prompt finds less than its conversation had, and names what changes within
system texts that begin alike."""

from types import SimpleNamespace
from typing import Any

import pytest

from paged_kv.server.completions.short_hits import (
    BEGINNING_CHARACTERS,
    MOST_CONVERSATIONS,
    MOST_TEXTS,
    ShortHits,
)
from paged_kv.server.http.schema import ChatBody

HISTORY = list(range(2_000))
TOKENIZER = SimpleNamespace(decode=lambda tokens: "".join(chr(97 + each % 26) for each in tokens))


class Chat:
    """Turns of one conversation, which begins with `opening`."""

    def __init__(self, known: ShortHits, opening: str = "hello") -> None:
        self.known, self.opening, self.turns = known, opening, 0

    def turn(self, tokens: list[int], cached: int, salt: str = "", tools: Any = None) -> None:
        self.turns += 1
        messages: Any = [{"role": "user", "content": self.opening}] * self.turns
        job: Any = SimpleNamespace(
            prompt=SimpleNamespace(tokens=tokens, media=None),
            cached_tokens=cached,
            request_id="r",
            salt=salt,
            session=None,
        )
        self.known.record(ChatBody(messages=messages, tools=tools), job, TOKENIZER)


@pytest.mark.parametrize(
    ("tokens", "cached", "more", "cause"),
    [
        ([*HISTORY, 1], 700, {}, "evicted"),
        ([*HISTORY, 1], 0, {"salt": "b"}, "cache_salt"),
        ([*HISTORY[:900], *[7] * 1_200], 900, {}, "template"),
        ([*HISTORY[:900], *[7] * 1_200], 768, {"tools": [{"a": 1}]}, "tools"),
        ([*HISTORY, 1], 1_999, {}, None),
        ([*HISTORY[:1_800], *[7] * 300], 1_800, {}, None),
    ],
)
def test_a_short_hit_says_why(
    tokens: list[int],
    cached: int,
    more: dict[str, Any],
    cause: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = ShortHits()
    chat = Chat(known)
    chat.turn(HISTORY, 0)
    chat.turn(tokens, cached, **more)
    assert (known.last is None) == (cause is None)
    if known.last is not None:
        assert cause is not None
        assert cause in known.last.cause
        assert cause in caplog.text
        assert (known.last.cached, known.last.expected) == (cached, len(HISTORY))
        if known.last.parted == 900:
            assert (known.last.before[-1], known.last.earlier[0], known.last.now[0]) == tuple("pqh")


def test_other_conversations_are_not_compared() -> None:
    known = ShortHits()
    first, second = Chat(known), Chat(known, "good day")
    first.turn(HISTORY, 0)
    second.turn(HISTORY[5:], 0)
    second.turn(HISTORY[5:], len(HISTORY) - 5)
    # A second conversation that begins alike has no more messages.
    Chat(known).turn(HISTORY[::-1], 0)
    assert known.last is None
    for number in range(MOST_CONVERSATIONS):
        Chat(known, str(number)).turn([1], 0)
    first.turn(HISTORY, 0)
    assert known.last is None


def test_what_changes_within_a_system_text_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    known, prompt = ShortHits(), SimpleNamespace(tokens=[0] * 9, media=None)
    long = "a" * BEGINNING_CHARACTERS

    def told(*texts: str, salt: str = "", role: str = "system") -> str:
        job: Any = SimpleNamespace(prompt=prompt, cached_tokens=5, salt=salt, session=None)
        parts = [{"type": "text", "text": text} for text in texts]
        caplog.clear()
        messages: Any = [{"role": role, "content": parts}, {"role": "user", "content": long}]
        known.record(ChatBody(messages=messages), job, TOKENIZER)
        return caplog.text

    assert not told(long, "It is May.") + told(long, "It is May.") + told(long, "Is", salt="b")
    assert not told(long, role="user") + told("short")
    assert len(known._texts) == 2
    changed = told(long, "It is Monday.", role="developer")
    assert all(shown in changed for shown in ("'ay.'", "'onday.'", "first 5"))
    assert not told(long, "It is Monday.") + told(long, "It is June.") + told("b", long)
    assert "an earlier system text has ''" in told("b", long, "c")
    for number in range(MOST_TEXTS):
        told(f"{number}", long)
    assert len(known._texts) == MOST_TEXTS
