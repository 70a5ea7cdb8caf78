"""Says why a prompt finds much less in the cache than the turn before it has left there."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.prefix.keeping import inner_salt
from paged_kv.server.engine.jobs import Job
from paged_kv.server.http.schema import ChatBody

log = logging.getLogger(__name__)

MOST_CONVERSATIONS = 32
# Fewer missing tokens are as quickly computed as explained.
WORTH_TELLING = 2 * PAGE_SIZE
# Of what is shown of two prompts where they part.
_SHOWN_TOKENS = 8


@dataclass(frozen=True)
class ShortHit:
    """A prompt that found much less than its conversation had.

    Attributes:
        request: its id.
        cached: its first tokens that were cached.
        expected: the tokens of the turn before.
        parted: how many first tokens it shares with that turn.
        before: the text in front of that place.
        earlier, now: the texts that follow there.
        cause: the likely one.
    """

    request: str
    cached: int
    expected: int
    parted: int
    before: str
    earlier: str
    now: str
    cause: str


class _Turn(NamedTuple):
    tokens: Any  # uint32, of the prompt
    messages: int
    tools: str
    salt: Hashable


class ShortHits:
    """The latest conversations of a server.

    Attributes:
        last: the latest prompt that found too little.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[Hashable, str], _Turn] = OrderedDict()
        self.last: ShortHit | None = None

    def record(self, body: ChatBody, job: Job, tokenizer: Any) -> None:
        """Log why a prompt that has begun found little, if it continues a conversation."""
        assert job.prompt is not None, "it has begun"
        opening = next((each for each in body.messages if each["role"] == "user"), None)
        if opening is None or job.prompt.media is not None:
            return
        key = job.session, json.dumps(opening, sort_keys=True, default=str)
        turn = _Turn(
            np.array(job.prompt.tokens, np.uint32),
            len(body.messages),
            json.dumps(body.tools, sort_keys=True),
            inner_salt(job.salt),
        )
        earlier = self._turns.pop(key, None)
        self._turns[key] = turn
        if len(self._turns) > MOST_CONVERSATIONS:
            self._turns.popitem(last=False)
        if earlier is not None and earlier.messages < turn.messages:
            self._compare(earlier, turn, job, tokenizer)

    def _compare(self, earlier: _Turn, turn: _Turn, job: Job, tokenizer: Any) -> None:
        expected, cached = len(earlier.tokens), job.cached_tokens
        if expected - cached < max(WORTH_TELLING, expected // 8):
            return
        parted = _common_prefix(earlier.tokens, turn.tokens)

        def text(tokens: Any) -> str:
            return str(tokenizer.decode(tokens.tolist()))

        self.last = ShortHit(
            job.request_id,
            cached,
            expected,
            parted,
            text(turn.tokens[max(0, parted - _SHOWN_TOKENS) : parted]),
            text(earlier.tokens[parted : parted + _SHOWN_TOKENS]),
            text(turn.tokens[parted : parted + _SHOWN_TOKENS]),
            _cause(earlier, turn, parted, cached),
        )
        log.warning(
            "%(request)s: only %(cached)d first tokens are cached, of %(expected)d that the turn "
            "before had: %(cause)s. The two part after %(parted)d tokens: behind %(before)r the "
            "earlier one has %(earlier)r, this one %(now)r",
            asdict(self.last),
        )


def _common_prefix(tokens: Any, others: Any) -> int:
    length = min(len(tokens), len(others))
    different = np.flatnonzero(tokens[:length] != others[:length])
    return int(different[0]) if len(different) else length


def _cause(earlier: _Turn, turn: _Turn, parted: int, cached: int) -> str:
    if earlier.salt != turn.salt:
        return "it came with another cache_salt or API key"
    if cached + PAGE_SIZE <= parted:
        return "the rest was evicted, or was never kept: see --max-kv-bytes"
    if earlier.tools != turn.tools:
        return "its tools are others"
    return "the client or the chat template changed earlier messages"
