"""Reads pages of prompts from servers before the prompts begin, while others are generated.

A job whose prompt may be on a server waits aside until its pages are in memory. With
--prefill-from, what no tier holds of a long prompt is computed by another server, which publishes
pages as they are filled; they are read as they come. Whatever fails or takes too long costs that
time, and the prompt is computed here.
"""

from __future__ import annotations

import http.client
import json
import logging
import re
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from threading import Event, Thread
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from paged_kv.allocator.errors import UnknownSession
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.prefix.keeping import StorePolicy, store_policy_of
from paged_kv.store.keys import Wanted
from paged_kv.store.tiered_store import PrefetchBuffer

log = logging.getLogger(__name__)

PREFILL_PATH = "/v1/prefill"
_PROGRESS = re.compile(rb": keepalive (\d{1,12})/\d")
# What an error begins with that comes when the other server has answered already.
_ERROR = b'data: {"error":'
_MOST_QUOTED = 400
_CONNECT_S = 2.0
# The other server says at least every few seconds that it is there.
_SILENT_S = 30.0
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class OtherServer:
    """A server that computes prompts, and the key that it asks for, if it asks."""

    url: str
    api_key: str | None = field(default=None, repr=False)


class PrefillRequest:
    """One prompt on its way through another server. A thread follows the answer.

    Attributes:
        done: how many tokens the other server has computed.
        has_ended: whether it has computed all, refused, or cannot be reached.
        error: what went wrong; None if nothing has.
        news: set whenever one of these changes.
    """

    def __init__(self, server: OtherServer, tokens: Sequence[int], salt: Hashable) -> None:
        self.done = 0
        self.has_ended = False
        self.news = Event()
        self.error: str | None = None
        self._headers: dict[str, bytes | str] = {"Content-Type": "application/json"}
        if server.api_key is not None:
            self._headers["Authorization"] = b"Bearer " + server.api_key.encode()
        self._url = urlsplit(server.url)
        self._body = json.dumps(
            {"prompt": list(tokens), "cache_salt": salt, "max_tokens": 1, "stream": True}
        )
        is_secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        self._connection = kind(self._url.hostname or "", self._url.port, timeout=_CONNECT_S)
        self._thread = Thread(target=self._run, name="paged-kv-prefill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave: the other server stops computing."""
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(2)

    def _run(self) -> None:
        try:
            self._follow()
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.error = type(error).__name__
        finally:
            self._connection.close()
            self.has_ended = True
            self.news.set()

    def _follow(self) -> None:
        connection = self._connection
        connection.connect()
        connection.sock.settimeout(_SILENT_S)
        path = self._url.path.rstrip("/") + PREFILL_PATH
        connection.request("POST", path, self._body, self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            hint = ", give its API key with --prefill-key" if answer.status == 401 else ""
            self.error = f"status {answer.status}{hint}"
            return
        while line := answer.readline(_LONGEST_LINE):
            if progress := _PROGRESS.match(line):
                self.done = int(progress[1])
                self.news.set()
            elif line.startswith(_ERROR):
                self.error = line[len(_ERROR) : _MOST_QUOTED].decode(errors="replace")


# Prompts that are fetched at once; others wait for these.
_AT_ONCE = 4
_POLL_S = 0.01
# How long published pages may take after the other server has computed them.
_PUBLISH_S = 2.0
# How long a step of the other server may take: at least so long, and so many times as long as here.
_STEP_S, _SLOWER = 5.0, 4.0
_STEP_TOKENS = 2048


@dataclass(eq=False)
class _Fetch:
    """A prompt whose pages are fetched."""

    prompt: list[int]
    salt: Hashable
    wanted: Wanted
    # Of entries that were read, which hold `tokens` tokens.
    keys: list[str] = field(default_factory=list)
    tokens: int = 0
    tier: str = ""  # where they came from
    seconds: float = 0.0  # how long reading them took
    is_cancelled: Event = field(default_factory=Event)  # set when nobody waits any more


class PromptFetcher:
    """Fetches prompts of one model. Its methods run on the generation thread.

    Args:
        factory: of the model; its store has servers.
        other: computes long prompts; None where there is no such server.
        over: how many unknown tokens a prompt must have more than, to be handed over.
    """

    def __init__(
        self, factory: PagedCacheFactory, other: OtherServer | None = None, over: int = 0
    ) -> None:
        assert factory.store is not None, "there are tiers to fetch from"
        self._factory = factory
        self._store = factory.store
        self._store.prefetched = self._prefetched = PrefetchBuffer()
        self._other = other
        self._over = over
        self._fetches: dict[int, _Fetch] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="paged-kv-fetch")

    def close(self) -> None:
        for fetch in self._fetches.values():
            fetch.is_cancelled.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(
        self,
        number: int,
        prompt: list[int],
        salt: Hashable,
        when_done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Fetch the prompt of a job if servers may hold some of it; false if not, and then
        `when_done` is not called. Another thread calls it."""
        if store_policy_of(salt) is not StorePolicy.DEFAULT:
            return False
        wanted = self._factory.wanted_blocks(prompt, salt=salt)
        if wanted is None or len(prompt) - wanted.beyond <= PAGE_SIZE:
            return False
        fetch = self._fetches[number] = _Fetch(prompt, salt, wanted)
        self._threads.submit(self._run, fetch).add_done_callback(lambda _: when_done())
        return True

    def end(self, number: int) -> None:
        """Forget what a job has not used: it has what it needs, or has left."""
        fetch = self._fetches.pop(number, None)
        if fetch is None:
            return
        fetch.is_cancelled.set()
        self._prefetched.discard(fetch.keys)
        if fetch.seconds:
            rate = self._factory.prefixes.rates.reading[fetch.tier]
            rate.record(fetch.tokens, fetch.seconds)

    # What follows runs on other threads.

    def _run(self, fetch: _Fetch) -> None:
        try:
            began = monotonic()
            known = self._prefetch(fetch, fetch.wanted)
            if known > fetch.wanted.beyond:
                fetch.tokens, fetch.seconds = known - fetch.wanted.beyond, monotonic() - began
            is_long = len(fetch.prompt) - known > self._over
            if self._other is not None and is_long and self._store.is_reachable:
                self._prefill(fetch, self._other, known)
        except Exception:  # whatever fails in a tier costs time, and never the answer
            log.exception("a prompt could not be fetched; it is computed here")
        finally:
            if fetch.is_cancelled.is_set():
                self._prefetched.discard(fetch.keys)

    def _prefetch(self, fetch: _Fetch, wanted: Wanted, *, is_awaited: bool = False) -> int:
        """Read what servers hold of a prompt; returns how many of its tokens are known then."""
        rates = self._factory.prefixes.rates
        for offer in self._store.offers(wanted, ask=True):
            tokens = offer.stored.num_tokens
            if is_awaited or rates.is_reading_quicker(tokens - wanted.beyond, offer.tier):
                keys = self._store.prefetch(offer, fetch.is_cancelled)
                fetch.keys += keys
                fetch.tier = offer.tier
                # If an entry could not be read, the blocks before it are still of use.
                return min(tokens, len(fetch.prompt)) if keys else wanted.beyond
        return wanted.beyond

    def _prefill(self, fetch: _Fetch, other: OtherServer, known: int) -> None:
        """Let the other server compute a prompt's full pages, and read them as they come."""
        full = (len(fetch.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        # One token more is generated behind the last full page.
        request = PrefillRequest(other, fetch.prompt[: full + 1], fetch.salt)
        try:
            reached = self._follow(fetch, request, known, full)
        finally:
            request.close()
        if reached < full:
            why = request.error or "its pages do not come"
            log.warning("%s does not compute a prompt (%s): it is computed here", other.url, why)

    def _follow(self, fetch: _Fetch, request: PrefillRequest, known: int, full: int) -> int:
        """Read pages as they are published; returns how many tokens are known in the end."""
        wanted = fetch.wanted
        # Rings and states are needed at the end alone, and would be read once more at each step.
        is_piecewise = not wanted.rings and not wanted.needs_checkpoint
        computing = self._factory.prefixes.rates.computing
        news, seen = monotonic(), 0
        while known < full and not fetch.is_cancelled.is_set() and self._store.is_reachable:
            request.news.clear()
            has_ended, done = request.has_ended, request.done
            computed = full if has_ended else done // PAGE_SIZE * PAGE_SIZE
            is_behind = computed > known and (is_piecewise or computed >= full)
            if is_behind:
                reached = self._prefetch(fetch, replace(wanted, beyond=known), is_awaited=True)
                if reached > known:
                    news, known = monotonic(), reached
                    continue
            if done > seen:
                news, seen = monotonic(), done
            step_s = _SLOWER * (computing.seconds_for(_STEP_TOKENS) or 0.0)
            if monotonic() - news > (_PUBLISH_S if is_behind else max(_STEP_S, step_s)):
                break
            if has_ended and request.error is not None and not request.done:
                break
            request.news.wait(_POLL_S)
        return known


@dataclass(eq=False)
class PromptReuse:
    """Keeps prompts. They share pages, every prompt reuses the longest cached prefix, and pages are
    evicted when memory gets short; mlx-lm's server keeps whole prompt caches."""

    # Of the loaded model, and of its draft model, whose prompts `ModelDraft` reuses: for these only
    # the limits hold. Empty while no model is loaded.
    factories: list[PagedCacheFactory]
    # The most prompts to cache, not counting prefixes of others; None for as many as memory allows.
    max_prompts: int | None = None
    # Of all pages, in use or cached; above it, cached ones are evicted. None for no limit.
    max_bytes: int | None = None
    # From 0 to 1: the most of the memory that `hold` may hold; under one salt half of it.
    held_share: float = 0.0
    _now: float = field(default=0.0, init=False)

    def insert(
        self, tokens: list[int], prompt_cache: list[Any], salt: Hashable, session: str | None = None
    ) -> None:
        """Cache what a prompt cache holds of these tokens, as a session's if one is named. This
        empties the list: its pages would stay in use as long as a reference to it exists."""
        for factory in self.factories[:1]:
            factory.insert_cache(tokens, prompt_cache, salt=salt, session=session)
        prompt_cache.clear()
        self._trim()

    def end_session(self, session: str, salt: Hashable) -> int:
        """Evict what only the prompts of a session use; returns how many blocks' worth of tokens
        that was, or raises UnknownSession. What a draft model has of them stays."""
        if not self.factories:
            raise UnknownSession(session, 0)
        return self.factories[0].end_session(session, salt=salt)

    @property
    def next_end(self) -> float:
        """Nothing that is held ends before this time."""
        return self.factories[0].pool.index.holds.next_end if self.factories else inf

    def advance(self, now: float) -> None:
        """Let the time be `now`, in seconds of any clock: what was held until then may go."""
        self._now = now
        for factory in self.factories[:1]:
            factory.pool.index.holds.expire(now)

    def hold(self, tokens: list[int], seconds: float, salt: Hashable) -> None:
        """For so long, evict what is cached of these tokens after all that is not held."""
        for factory in self.factories[:1] if self.held_share else ():
            factory.hold(tokens, until=self._now + seconds, most=self.held_share, salt=salt)

    def _trim(self) -> None:
        """Evict the prompts that are worth least until both limits hold."""
        if self.max_prompts is None and self.max_bytes is None:
            return
        in_all = sum(factory.pool.budget.max_bytes for factory in self.factories)
        for factory in self.factories:
            most = None
            if self.max_bytes is not None:
                share = self.max_bytes * factory.pool.budget.max_bytes // in_all
                most = max(0, share - factory.stats().bytes_active)
            factory.prefixes.trim(max_prompts=self.max_prompts, max_bytes=most)
