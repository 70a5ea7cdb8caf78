"""Reuses prefixes of requests' prompts from the prefix caches of the loaded models.

mlx-lm's server keeps whole prompt caches by the prompts' tokens. Here prompts share pages, every
prompt reuses the longest cached prefix, and pages are evicted when memory gets short.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import Any

from paged_kv.integrations.paged_cache_factory import PagedCacheFactory


class PromptReuse:
    """Finds and keeps prefixes of prompts.

    Args:
        factories: of the loaded model; and of its draft model, if there is one, whose prompts
            `ModelDraft` reuses: only the limits hold for them.
        max_prompts: the most prompts to cache, not counting prefixes of others; None for as many as
            memory allows.
        max_bytes: the most bytes of all pages, in use or cached; above it, cached ones are evicted.
            None for as many as memory allows.
        held_share: the most of the memory that `hold` may hold, 0 to 1; under one salt half of it.
    """

    def __init__(
        self,
        factories: list[PagedCacheFactory],
        max_prompts: int | None = None,
        max_bytes: int | None = None,
        held_share: float = 0.0,
    ) -> None:
        self._factories = factories
        self._factory = factories[0] if factories else None
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._held_share = held_share
        self._now = 0.0

    def fetch(self, tokens: list[int], salt: Hashable) -> tuple[list[Any] | None, int]:
        """A prompt cache with the longest cached prefix of a prompt, which may be empty, and its
        length in tokens; at least one token is left. None without a model.

        An empty cache is useful too: in it, layers with a window cache their out-of-window blocks.
        """
        if self._factory is None:
            return None, 0
        return self._factory.fetch_cache(tokens, salt=salt)

    def peek(self, tokens: list[int], salt: Hashable) -> tuple[int, int]:
        """The length of the prefix that `fetch` would find in memory now, and how many first tokens
        are in full pages that sequences hold."""
        return (0, 0) if self._factory is None else self._factory.peek(tokens, salt=salt)

    def insert(self, tokens: list[int], prompt_cache: list[Any], salt: Hashable) -> None:
        """Cache what a prompt cache holds of these tokens. This empties the list: its pages would
        stay in use as long as a reference to it exists."""
        if self._factory is not None:
            self._factory.insert_cache(tokens, prompt_cache, salt=salt)
        prompt_cache.clear()
        self._trim()

    @property
    def next_end(self) -> float:
        """Nothing that is held ends before this time."""
        return inf if self._factory is None else self._factory.pool.timed_pins.next_end

    def advance(self, now: float) -> None:
        """Let the time be `now`, in seconds of any clock: what was held until then may go."""
        self._now = now
        if self._factory is not None:
            self._factory.pool.timed_pins.expire(now)

    def hold(self, tokens: list[int], seconds: float, salt: Hashable) -> None:
        """For so long, evict what is cached of these tokens after all that is not held."""
        if self._factory is not None and self._held_share:
            until = self._now + seconds
            self._factory.hold(tokens, until=until, most=self._held_share, salt=salt)

    def _trim(self) -> None:
        """Evict the least recently used prompts until both limits hold."""
        if self._max_prompts is None and self._max_bytes is None:
            return
        in_all = sum(factory.pool.budget.max_bytes for factory in self._factories)
        for factory in self._factories:
            most = None
            if self._max_bytes is not None:
                share = self._max_bytes * factory.pool.budget.max_bytes // in_all
                most = max(0, share - factory.stats().bytes_active)
            factory.prefixes.trim(max_prompts=self._max_prompts, max_bytes=most)
