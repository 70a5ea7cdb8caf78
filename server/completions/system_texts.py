"""Names what changes within the system texts of requests: nothing behind it is cached."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from itertools import takewhile
from typing import Any

from paged_kv.lru import LRU
from paged_kv.prefix.keeping import inner_salt
from paged_kv.server.engine.jobs import Job

log = logging.getLogger(__name__)

# Texts of another beginning are others' instructions. Shorter texts cost little to compute again.
BEGINNING_CHARACTERS = 1024
# Of each text, for its comparison with the next. Agents have some 60,000.
MOST_CHARACTERS = 1 << 17
MOST_TEXTS = 64
# Of what differs, and before it.
SHOWN_CHARACTERS = 24


class SystemTexts:
    """The latest system texts of a server, one for each beginning."""

    def __init__(self) -> None:
        # By their salts and beginnings; None once a change was told.
        self._texts: LRU[tuple[Hashable, str], str | None] = LRU(MOST_TEXTS)

    def record(self, messages: Iterable[Any], job: Job) -> None:
        """Log where the system text of a chat parts from an earlier one, once for a beginning.

        Args:
            messages: of the chat.
            job: its prompt, which has begun.
        """
        text = _system_text(messages)[:MOST_CHARACTERS]
        if len(text) < BEGINNING_CHARACTERS:
            return
        key = inner_salt(job.salt), text[:BEGINNING_CHARACTERS]
        earlier = self._texts.get(key, text)
        self._texts[key] = text if earlier == text else None
        if earlier not in (None, text):
            _tell(earlier, text, job)


def _system_text(messages: Iterable[Any]) -> str:
    first = takewhile(lambda each: each["role"] in ("system", "developer"), messages)
    contents = [each.get("content") or "" for each in first]
    parts = [[{"text": each}] if isinstance(each, str) else each for each in contents]
    return "".join(part.get("text", "") for each in parts for part in each)


def _tell(earlier: str, text: str, job: Job) -> None:
    assert job.prompt is not None, "it has begun"
    pairs = enumerate(zip(earlier, text, strict=False))
    shorter = min(len(earlier), len(text))
    at = next((at for at, (there, here) in pairs if there != here), shorter)
    end = at + SHOWN_CHARACTERS
    log.warning(
        "%s: of %d prompt tokens the first %d are cached: behind %r an earlier system text has %r, "
        "and this one %r. Put what changes last, into the latest message",
        job.request_id,
        len(job.prompt.tokens),
        job.cached_tokens,
        text[max(0, at - SHOWN_CHARACTERS) : at],
        earlier[at:end],
        text[at:end],
    )
