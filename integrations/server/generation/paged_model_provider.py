"""mlx-lm's ModelProvider, extended to give each loaded model paged caches."""

from __future__ import annotations

import argparse
import logging
import secrets
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ModelProvider
from mlx_lm.utils import load

from paged_kv.admission.pool_size import PoolSize
from paged_kv.integrations.batching.pool_memory import pool_size, shares
from paged_kv.integrations.distributed.digests import require_same_prefixes
from paged_kv.integrations.distributed.meeting import joined_ranks
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache
from paged_kv.integrations.server.generation.prompt_reuse import PromptReuse
from paged_kv.kernels.pages.memory import recommended_bytes

# Paths or repositories of a model, its adapter and its draft model, as in mlx-lm's `model_key`.
ModelKey = tuple[str | None, str | None, str | None]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A description of the loaded model that other threads may read.

    Attributes:
        key: names it.
        tokenizer: mlx-lm's.
        processor: of images; None if the server takes none.
        vocab_size: its token ids are less than this.
        has_draft: whether a draft model is loaded with it.
        is_batchable: whether several sequences can run as a batch.
        has_states: whether it has recurrent layers.
        text_machine: separates reasoning and tool calls from text.
    """

    key: ModelKey
    tokenizer: Any
    processor: Any
    vocab_size: int
    has_draft: bool
    is_batchable: bool
    has_states: bool
    text_machine: TextStateMachine


class PagedModelProvider(ModelProvider):
    """Loads one model, and maybe its draft model, at a time.

    Args:
        cli_args: mlx-lm's options, and `max_kv_bytes`, `page_format`, `store`, `store_bytes`.

    Attributes:
        factories: of the loaded model and of its draft model. They are installed, and closed when
            another model is loaded.
        loaded: the loaded model, if there is one; other threads may read this.
        reuse: the cached prompts of the loaded models.
        ranks: the processes that share the model.
    """

    def __init__(self, cli_args: argparse.Namespace) -> None:
        self.ranks = joined_ranks()
        self.factories: list[PagedCacheFactory] = []
        self.loaded: LoadedModel | None = None
        self.reuse = PromptReuse([])
        super().__init__(cli_args)
        self.default_key: ModelKey = (cli_args.model, cli_args.adapter_path, cli_args.draft_model)

    def reset(self) -> None:
        """Unload the model."""
        self.loaded = None
        self.reuse = PromptReuse([])
        for factory in self.factories:
            factory.close()
        self.factories = []
        super().reset()

    def check(self, key: ModelKey) -> None:
        """Raise what loading a model would raise, without memory for weights. It downloads the
        model if necessary. Any thread may call this."""
        model, adapter, draft = key
        assert model is not None, "there is a name to check"
        load(
            model,
            adapter_path=adapter,
            tokenizer_config=self._tokenizer_config,
            trust_remote_code=self.cli_args.trust_remote_code,
            lazy=True,
        )
        if draft is not None:
            load(draft, lazy=True)

    def switch_to(self, key: ModelKey) -> None:
        """Replace the loaded model by another; if that fails, load the earlier one again."""
        before = self.loaded
        try:
            self._load(*key)
        except Exception:
            if before is not None:
                logging.warning("loading %s again", before.key[0])
                self._load(*before.key)
            raise

    def pool_sizes(self) -> list[PoolSize]:
        """The memory that the pools of the loaded models can promise."""
        return [pool_size(factory.pool) for factory in self.factories]

    def require_same_caches(self) -> None:
        """Raise RanksDiffer if the ranks' caches have come apart."""
        for factory in self.factories:
            require_same_prefixes(self.ranks, factory.pool)

    def settle(self) -> None:
        """Release the blocks of dropped caches. Pools do that at their next call, which on an idle
        server may be much later."""
        for factory in self.factories:
            factory.stats()

    def _load(self, *paths: Any) -> None:
        super()._load(*paths)  # type: ignore[no-untyped-call]  # mlx-lm's
        if self.ranks.size > 1:
            # Each rank samples its tokens itself.
            mx.random.seed(self.ranks.of_first("seed", secrets.randbits(32)))
        try:
            self._make_factories()
            self.loaded = self._describe()
        except BaseException:
            # Else mlx-lm would take the model for loaded next time, and serve it without pages.
            self.reset()
            raise

    def _describe(self) -> LoadedModel:
        options = self.cli_args
        self.reuse = PromptReuse(
            self.factories, options.prompt_cache_size, options.prompt_cache_bytes
        )
        key: Any = self.model_key
        tokenizer: Any = self.tokenizer
        # transformers would warn of "indexing errors" in long texts; MLX's models have none.
        tokenizer.model_max_length = 1 << 60
        # Tokenizers change their settings at the first use; after it any thread may use them.
        tokenizer.encode("")
        return LoadedModel(
            key=key,
            tokenizer=tokenizer,
            # Other ranks get the tokens of a prompt, and not its images.
            processor=self.processor if self.ranks.size == 1 else None,
            vocab_size=_vocab_size(self.model),
            has_draft=self.draft_model is not None,
            is_batchable=self.is_batchable and options.kv_bits is None,
            has_states=any(factory.prefixes.has_states for factory in self.factories),
            text_machine=make_text_state_machine(tokenizer),
        )

    def _make_factories(self) -> None:
        models = [model for model in (self.model, self.draft_model) if model is not None]
        budget = self.cli_args.max_kv_bytes or recommended_bytes()
        # A single model's pool need not be tried out to know that it gets everything.
        found = [budget]
        if len(models) > 1:
            found = shares(budget, [self._factory(model, budget).pool for model in models])
        self.factories = [
            self._factory(model, share, self.cli_args.store)
            for model, share in zip(models, found, strict=True)
        ]
        for factory in self.factories:
            factory.install()

    def _factory(self, model: Any, max_bytes: int, store: str | None = None) -> PagedCacheFactory:
        factory = PagedCacheFactory(
            model,
            page_format=self.cli_args.page_format,
            max_bytes=max_bytes,
            store=store,
            store_bytes=self.cli_args.store_bytes,
        )
        # This makes the factory learn the size of a block, which promises are computed from.
        factory.can_admit(0)
        return factory


def _vocab_size(model: Any) -> int:
    """The number of a model's logits, from a step that is never evaluated."""
    logits = model(mx.array([[0]]), cache=stock_make_prompt_cache(model))
    return int(logits.shape[-1])
