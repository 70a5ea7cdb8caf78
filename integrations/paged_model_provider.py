"""mlx-lm's ModelProvider, which gives each model that it loads paged caches."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_lm.server import ModelDescription, ModelProvider

from paged_kv.integrations.admission import GroupSize, PoolSize
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.kernels.memory import recommended_bytes
from paged_kv.kernels.page_format import PAGE_SIZE
from paged_kv.page_pool import PagePool


class PagedModelProvider(ModelProvider):
    """Loads one model, and maybe its draft model, at a time.

    Args:
        cli_args: mlx-lm's options, and `max_kv_bytes`, `page_format`, `store`, `store_bytes`.

    Attributes:
        factories: of the loaded model and of its draft model. They are installed, and closed when
            others are loaded.
    """

    def __init__(self, cli_args: argparse.Namespace) -> None:
        self.factories: list[PagedCacheFactory] = []
        super().__init__(cli_args)

    def reset(self) -> None:
        """Unload what is loaded."""
        for factory in self.factories:
            factory.close()
        self.factories = []
        super().reset()

    def is_loaded(self, description: ModelDescription) -> bool:
        """Whether that is what `load` would return without loading anything."""
        key = (
            self._model_map.get(description.model, description.model),
            self._adapter_map.get(description.model, description.adapter),
            self._draft_model_map.get(description.draft, description.draft),
        )
        return bool(key == self.model_key)

    def pool_sizes(self) -> list[PoolSize]:
        """What the pools of the loaded models can promise."""
        return [pool_size(factory.pool) for factory in self.factories]

    def _load(self, *paths: Any) -> None:
        super()._load(*paths)  # type: ignore[no-untyped-call]
        try:
            self._make_factories()
        except BaseException:
            # With a key it would be taken for loaded the next time, and served without pages.
            self.reset()
            raise

    def _make_factories(self) -> None:
        models = [model for model in (self.model, self.draft_model) if model is not None]
        budget = self.cli_args.max_kv_bytes or recommended_bytes()
        # Both models keep the same tokens, so memory is divided as a token of theirs takes it.
        sizes = [self._token_bytes(model) if len(models) > 1 else 1 for model in models]
        shares = [budget * size // max(1, sum(sizes)) for size in sizes]
        self.factories = [
            self._factory(model, max(1, share), self.cli_args.store)
            for model, share in zip(models, shares, strict=True)
        ]
        for factory in self.factories:
            factory.install()

    def _token_bytes(self, model: Any) -> int:
        """What a token takes in all layers, but for a common factor."""
        pool = self._factory(model, recommended_bytes()).pool
        return sum(group.block_bytes for group in pool_size(pool).groups)

    def _factory(self, model: Any, max_bytes: int, store: str | None = None) -> PagedCacheFactory:
        factory = PagedCacheFactory(
            model,
            page_format=self.cli_args.page_format,
            max_bytes=max_bytes,
            store=store,
            store_bytes=self.cli_args.store_bytes,
        )
        # Learns how large a block is, which promises are made of.
        factory.can_admit(0)
        return factory


def pool_size(pool: PagePool) -> PoolSize:
    """What a pool can promise, once it is known what its layers write. With "auto" pages that is
    what fits in 16 bits: pages become smaller for what is cached, never for a promise."""
    groups = [group for group in pool.groups if group.is_open]
    return PoolSize(
        pool.budget.max_bytes,
        pool.slack,
        tuple(GroupSize(group.block_bytes, group.blocks_for) for group in groups),
        PAGE_SIZE,
    )
