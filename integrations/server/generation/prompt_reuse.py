"""Reuses prefixes of requests' prompts from the prefix caches of the loaded models.

mlx-lm's server keeps whole prompt caches by the prompts' tokens. Here prompts share pages, every
prompt reuses the longest cached prefix, and pages are evicted when memory gets short.
"""

from __future__ import annotations

from typing import Any

from paged_kv.integrations.paged_cache_factory import PagedCacheFactory


class PromptReuse:
    """Finds and keeps prefixes of prompts.

    Args:
        factories: of the loaded model and, if there is one, of its draft model.
        max_prompts: the most prompts to cache, not counting prefixes of others; None for as many as
            memory allows.
        max_bytes: the most bytes of all pages, in use or cached; above it, cached ones are evicted.
            None for as many as memory allows.
    """

    def __init__(
        self,
        factories: list[PagedCacheFactory],
        max_prompts: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        # If one model has no pages, no prefix can be reused by both.
        has_pages = all(each.pool.num_layers for each in factories)
        self._factories = factories if has_pages else []
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes

    def fetch(self, tokens: list[int], salt: str | None) -> tuple[list[Any] | None, int]:
        """A prompt cache with the longest cached prefix of a prompt, which may be empty, and its
        length in tokens; at least one token is left. None if a model has no pages.

        An empty cache is useful too: in it, layers with a window cache their out-of-window blocks.
        """
        if not self._factories:
            return None, 0
        known = len(tokens) - 1
        while True:
            # A hit never includes a prompt's last token, so ask with one more token.
            asked = tokens[: known + 1]
            found = [factory.fetch_cache(asked, salt=salt) for factory in self._factories]
            known = min(cached for _, cached in found)
            if all(cached == known for _, cached in found):
                return [cache for caches, _ in found for cache in caches], known

    def insert(self, tokens: list[int], prompt_cache: list[Any], salt: str | None) -> None:
        """Cache what a prompt cache of all models holds of these tokens. This empties the list:
        its pages would stay in use as long as a reference to it exists."""
        start = 0
        for factory in self._factories:
            end = start + factory.num_caches
            factory.insert_cache(tokens, prompt_cache[start:end], salt=salt)
            start = end
        prompt_cache.clear()
        self._trim()

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
