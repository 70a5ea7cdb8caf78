"""The log names what changes within system texts that begin alike."""

from types import SimpleNamespace
from typing import Any

import pytest

from paged_kv.server.completions.short_hits import BEGINNING_CHARACTERS, MOST_TEXTS, SystemTexts

LONG = "a" * BEGINNING_CHARACTERS


def test_what_changes_within_a_system_text_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    known, prompt = SystemTexts(), SimpleNamespace(tokens=[0] * 9)

    def told(*texts: str, salt: str = "", role: str = "system") -> str:
        job: Any = SimpleNamespace(prompt=prompt, cached_tokens=5, request_id="r", salt=salt)
        parts = [{"type": "text", "text": text} for text in texts]
        caplog.clear()
        known.record([{"role": role, "content": parts}, {"role": "user", "content": LONG}], job)
        return caplog.text

    assert not told(LONG, "It is May.") + told(LONG, "It is May.") + told(LONG, "Is", salt="b")
    assert not told(LONG, role="user") + told("short")
    assert len(known._texts) == 2
    changed = told(LONG, "It is Monday.", role="developer")
    assert all(shown in changed for shown in ("'ay.'", "'onday.'", "first 5"))
    assert not told(LONG, "It is Monday.") + told(LONG, "It is June.") + told("b", LONG)
    assert "an earlier system text has ''" in told("b", LONG, "c")
    for number in range(MOST_TEXTS):
        told(f"{number}", LONG)
    assert len(known._texts) == MOST_TEXTS
