"""Says why a prompt finds less in the cache than its conversation or its system text has left."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.lru import LRU
from paged_kv.prefix.keeping import inner_salt
from paged_kv.server.engine.jobs import Job
from paged_kv.server.http.schema import ChatBody

log = logging.getLogger(__name__)

MOST_CONVERSATIONS = 32
# Fewer missing tokens are as quickly computed as explained.
WORTH_TELLING = 2 * PAGE_SIZE
# Of what is shown of two prompts where they part.
_SHOWN_TOKENS = 8

# Texts of another beginning are others' instructions. Shorter texts cost little to compute again.
BEGINNING_CHARACTERS = 1024
# Of each text, for its comparison with the next. Agents have some 60,000.
MOST_CHARACTERS = 1 << 17
MOST_TEXTS = 64
# Of what differs, and before it.
SHOWN_CHARACTERS = 24


@dataclass(frozen=True)
class ShortHit:
    """A prompt that found much less than its conversation had: of `expected` tokens of the turn
    before `cached` ones. The two part after so many tokens, behind the text `before`."""

    request: str
    cached: int
    expected: int
    parted: int
    before: str
    earlier: str
    now: str
    cause: str


class _Turn(NamedTuple):
    tokens: array[int]  # of the prompt, in 4 bytes each
    messages: int
    tools: str
    salt: Hashable


class ShortHits:
    """The latest conversations and system texts of a server.

    Attributes:
        last: the latest prompt that found too little.
    """

    def __init__(self) -> None:
        self._turns: LRU[tuple[Hashable, str], _Turn] = LRU(MOST_CONVERSATIONS)
        # By their salts and beginnings; None once a change was told.
        self._texts: LRU[tuple[Hashable, str], str | None] = LRU(MOST_TEXTS)
        self.last: ShortHit | None = None

    def record(self, body: ChatBody, job: Job, tokenizer: Any) -> None:
        """Log why a prompt that has begun found little, if it continues a conversation, and where
        its system text parts from an earlier one, once for a beginning."""
        assert job.prompt is not None, "it has begun"
        self._compare_text(_system_text(body.messages), job)
        opening = next((each for each in body.messages if each["role"] == "user"), None)
        if opening is None or job.prompt.media is not None:
            return
        key = job.session, json.dumps(opening, sort_keys=True, default=str)
        turn = _Turn(
            array("I", job.prompt.tokens),
            len(body.messages),
            json.dumps(body.tools, sort_keys=True),
            inner_salt(job.salt),
        )
        earlier = self._turns.get(key)
        self._turns[key] = turn
        if earlier is not None and earlier.messages < turn.messages:
            self._compare(earlier, turn, job, tokenizer)

    def _compare(self, earlier: _Turn, turn: _Turn, job: Job, tokenizer: Any) -> None:
        expected, cached = len(earlier.tokens), job.cached_tokens
        if expected - cached < max(WORTH_TELLING, expected // 8):
            return
        parted = common_prefix(earlier.tokens, turn.tokens)
        shown = slice(parted, parted + _SHOWN_TOKENS)

        def text(tokens: array[int]) -> str:
            return str(tokenizer.decode(tokens.tolist()))

        self.last = ShortHit(
            job.request_id,
            cached,
            expected,
            parted,
            text(turn.tokens[max(0, parted - _SHOWN_TOKENS) : parted]),
            text(earlier.tokens[shown]),
            text(turn.tokens[shown]),
            _cause(earlier, turn, parted, cached),
        )
        log.warning(
            "only %(cached)d first tokens are cached, of %(expected)d that the turn "
            "before had: %(cause)s. The two part after %(parted)d tokens: behind %(before)r the "
            "earlier one has %(earlier)r, this one %(now)r",
            asdict(self.last),
        )

    def _compare_text(self, text: str, job: Job) -> None:
        if len(text) < BEGINNING_CHARACTERS:
            return
        key = inner_salt(job.salt), text[:BEGINNING_CHARACTERS]
        earlier = self._texts.get(key, text)
        self._texts[key] = text if earlier == text else None
        if earlier in (None, text):
            return
        assert job.prompt is not None, "it has begun"
        at = common_prefix(earlier, text)
        end = at + SHOWN_CHARACTERS
        log.warning(
            "of %d prompt tokens the first %d are cached: behind %r an earlier system text has %r, "
            "and this one %r. Put what changes last, into the latest message",
            len(job.prompt.tokens),
            job.cached_tokens,
            text[max(0, at - SHOWN_CHARACTERS) : at],
            earlier[at:end],
            text[at:end],
        )


def _cause(earlier: _Turn, turn: _Turn, parted: int, cached: int) -> str:
    if earlier.salt != turn.salt:
        return "it came with another cache_salt or API key"
    if cached + PAGE_SIZE <= parted:
        return "the rest was evicted, or was never kept: see --max-kv-bytes"
    if earlier.tools != turn.tools:
        return "its tools are others"
    return "the client or the chat template changed earlier messages"


def _system_text(messages: Iterable[Any]) -> str:
    first = takewhile(lambda each: each["role"] in ("system", "developer"), messages)
    contents = [each.get("content") or "" for each in first]
    parts = [[{"text": each}] if isinstance(each, str) else each for each in contents]
    text = "".join(part.get("text", "") for each in parts for part in each)
    return text[:MOST_CHARACTERS]
