"""What stands in the place of mlx-lm's LRUPromptCache: the prefix caches of the loaded models.

mlx-lm keeps whole prompt caches, by the prompts' tokens. Here prompts share pages, any prompt finds
the longest beginning that is known, and pages are evicted when memory gets short.
"""

from __future__ import annotations

from typing import Any, Protocol

from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.salted_tokens import salt_of


class LoadedModels(Protocol):
    """What is loaded.

    Attributes:
        model_key: names it.
        factories: of the model and, if there is one, of its draft model.
    """

    model_key: Any
    factories: list[PagedCacheFactory]


class PagedPromptCache:
    """The interface of mlx-lm's LRUPromptCache.

    Args:
        loaded: the models whose prompts are kept. Prompts of others are not found, nor kept.
        max_size: prompts to keep, of those that are not the beginning of another; None for as many
            as memory allows.
        max_bytes: bytes of the pages that no request uses; None for as many as memory allows.
    """

    def __init__(
        self, loaded: LoadedModels, max_size: int | None = None, max_bytes: int | None = None
    ) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self._loaded = loaded

    def __len__(self) -> int:
        """Prompts that are not the beginning of another."""
        return max((len(each.prefixes) for each in self._factories), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that no request uses."""
        return sum(factory.prefixes.nbytes for factory in self._factories)

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """A prompt cache that holds as much of a prompt as is known, maybe nothing, and the tokens
        that are left, at least one. None if the model is not loaded or has no pages.

        What holds nothing is worth having too: layers with a window keep what they pass in it.
        """
        if model != self._loaded.model_key or not self._factories:
            return None, tokens
        caches, cached = self._fetch_alike(tokens)
        return caches, tokens[cached:]

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep what a prompt cache holds; the list is emptied, as the server goes on referring to
        it, and the pages would be in use for as long. `cache_type` makes no difference: beginnings
        that many prompts share are used often, and so are evicted last."""
        if model == self._loaded.model_key:
            start = 0
            for factory in self._factories:
                end = start + factory.num_caches
                factory.insert_cache(tokens, prompt_cache[start:end], salt=salt_of(tokens))
                start = end
        prompt_cache.clear()
        self.trim_to(n_sequences=self.max_size, n_bytes=self.max_bytes)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict the least recently used pages until at most so many prompts and bytes are kept."""
        in_all = sum(factory.pool.budget.max_bytes for factory in self._factories)
        for factory in self._factories:
            share = factory.pool.budget.max_bytes / in_all
            factory.prefixes.trim(
                max_prompts=n_sequences,
                max_bytes=None if n_bytes is None else int(max(0, n_bytes) * share),
            )

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """What the server logs."""
        return {"pages": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    @property
    def _factories(self) -> list[PagedCacheFactory]:
        """Those of the loaded models; none if one of them has no pages."""
        factories = self._loaded.factories
        return factories if all(each.pool.num_layers for each in factories) else []

    def _fetch_alike(self, tokens: list[int]) -> tuple[list[Any], int]:
        """The caches of all models, each up to the same token, and how many tokens that is."""
        known, salt = len(tokens) - 1, salt_of(tokens)
        while True:
            # A prompt's last token is never found, so one more is asked for than is known.
            asked = tokens[: known + 1]
            found = [factory.fetch_cache(asked, salt=salt) for factory in self._factories]
            known = min(cached for _, cached in found)
            if all(cached == known for _, cached in found):
                return [cache for caches, _ in found for cache in caches], known
