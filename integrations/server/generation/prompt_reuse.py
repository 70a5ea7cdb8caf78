"""What the prompts of requests can begin with: the prefix caches of the loaded models.

mlx-lm's server keeps whole prompt caches, by the prompts' tokens. Here prompts share pages, any
prompt finds the longest beginning that is known, and pages are evicted when memory gets short.
"""

from __future__ import annotations

from typing import Any

from paged_kv.integrations.paged_cache_factory import PagedCacheFactory


class PromptReuse:
    """Finds and keeps beginnings of prompts.

    Args:
        factories: of the loaded model and, if there is one, of its draft model.
        max_prompts: prompts to keep, of those that are not the beginning of another; None for as
            many as memory allows.
        max_bytes: bytes of all pages, in use or kept, above which none are kept; None for as many
            as memory allows.
    """

    def __init__(
        self,
        factories: list[PagedCacheFactory],
        max_prompts: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        # One model without pages leaves nothing that both can begin with.
        has_pages = all(each.pool.num_layers for each in factories)
        self._factories = factories if has_pages else []
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes

    def fetch(self, tokens: list[int], salt: str | None) -> tuple[list[Any] | None, int]:
        """A prompt cache that holds as much of a prompt as is known, maybe nothing, and how many
        tokens that is; at least one is left. None if a model has no pages.

        What holds nothing is worth having too: layers with a window keep what they pass in it.
        """
        if not self._factories:
            return None, 0
        known = len(tokens) - 1
        while True:
            # A prompt's last token is never found, so one more is asked for than is known.
            asked = tokens[: known + 1]
            found = [factory.fetch_cache(asked, salt=salt) for factory in self._factories]
            known = min(cached for _, cached in found)
            if all(cached == known for _, cached in found):
                return [cache for caches, _ in found for cache in caches], known

    def insert(self, tokens: list[int], prompt_cache: list[Any], salt: str | None) -> None:
        """Keep what a prompt cache, of all models, holds of these tokens. The list is emptied: the
        pages would be in use for as long as somebody refers to it."""
        start = 0
        for factory in self._factories:
            end = start + factory.num_caches
            factory.insert_cache(tokens, prompt_cache[start:end], salt=salt)
            start = end
        prompt_cache.clear()
        self._trim()

    def _trim(self) -> None:
        """Evict what was used least recently, until no more is kept than was asked."""
        if self._max_prompts is None and self._max_bytes is None:
            return
        in_all = sum(factory.pool.budget.max_bytes for factory in self._factories)
        for factory in self._factories:
            most = None
            if self._max_bytes is not None:
                share = self._max_bytes * factory.pool.budget.max_bytes // in_all
                most = max(0, share - factory.stats().bytes_active)
            factory.prefixes.trim(max_prompts=self._max_prompts, max_bytes=most)
