"""mlx-lm's ModelProvider, extended to give each loaded model paged caches."""

from __future__ import annotations

import gc
import logging
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.processors import PROCESSORS
from mlx_lm.server import ModelProvider
from mlx_lm.utils import load, load_config

from paged_kv.allocator.errors import NotReproducible
from paged_kv.extras import extra_module, install_command
from paged_kv.integrations.distributed.connected_ranks import joined_ranks
from paged_kv.integrations.mlx_lm_internals import downloaded, knows_model
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache
from paged_kv.integrations.slow_products import warn_of_slow_products
from paged_kv.integrations.speculation.draft_models import (
    divided_factories,
    load_draft_model,
    make_draft,
)
from paged_kv.integrations.speculation.drafts import Draft
from paged_kv.integrations.states.one_by_one import is_separate
from paged_kv.kernels.pages.memory import limited_freed_buffers
from paged_kv.server.engine.chat_templates import (
    KeptTokens,
    TemplateRoles,
    callless_machine,
    kept_tokens_of,
    roles_of,
)
from paged_kv.server.engine.model_limits import budget_named, context_length, freed_buffers_limit
from paged_kv.server.engine.prompt_fetcher import OtherServer, PromptFetcher, PromptReuse
from paged_kv.server.engine.sampling import ModelGrammars
from paged_kv.server.http.access import read_prefill_key
from paged_kv.server.http.api_errors import APIError, shortened
from paged_kv.server.options import ServerOptions

# Paths or repositories of a model, its adapter and its draft model, or how else it drafts, as in
# mlx-lm's `model_key`.
ModelKey = tuple[str | None, str | None, str | None]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A description of the loaded model that other threads may read."""

    key: ModelKey
    tokenizer: Any  # mlx-lm's
    processor: Any  # of images that mlx-lm's model reads; None for others
    prompts: Any  # makes the prompts of a model of mlx-vlm; None for others
    media_marks: dict[int, str]  # texts of the tokens that stand for images and sounds, by id
    why_no_images: str | None  # what a client is told that sends one; None if the model takes them
    vocab_size: int  # its token ids are less than this
    context_length: int | None  # None if its config does not say
    is_batchable: bool
    has_states: bool  # of recurrent layers
    at_pages: bool  # prompts resume only after full pages: quantised, stored or reproducible ones
    text_machine: TextStateMachine  # separates reasoning and tool calls from text
    callless_machine: TextStateMachine  # separates reasoning from text, for requests without tools
    roles: TemplateRoles
    grammars: ModelGrammars
    kept_tokens: KeptTokens | None  # of the parts of chats; None if its tokenizer needs them whole


class PagedModelProvider(ModelProvider):
    """Loads one model, and maybe its draft model, at a time.

    Raises:
        ValueError, OSError: the key of the server that computes prompts cannot be read.

    Attributes:
        factories: of the loaded model and of its draft model. They are installed, and closed when
            another model is loaded.
        loaded: the loaded model, if there is one; other threads may read this.
        draft: drafts for the loaded model; None without drafts.
        prompt_step: the most tokens of a prompt step, for which memory is left.
        fetchers: read prompts' pages from servers in advance, one for each of the factories; none
            if the store has no servers.
        ranks: the processes that share the model.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.ranks = joined_ranks()
        self.factories: list[PagedCacheFactory] = []
        self.fetchers: list[PromptFetcher] = []
        self.model_key: Any = None
        self.draft_model: Any = None
        self.options = options
        self.prompt_step = options.prefill_step_size
        self._other: OtherServer | None = None
        if options.prefill_from is not None:
            self._other = OtherServer(options.prefill_from, read_prefill_key(options.prefill_key))
        self._limits = ExitStack()  # of MLX, while a model is loaded
        cli_args: Any = options
        super().__init__(cli_args)
        self.reset()
        self._how_to_load: dict[str, Any] = {
            "tokenizer_config": self._tokenizer_config,
            "trust_remote_code": options.trust_remote_code,
        }
        self.default_key: ModelKey = (options.model, options.adapter_path, options.draft_model)

    def reset(self) -> None:
        self.loaded: LoadedModel | None = None
        self.draft: Draft | None = None
        self.reuse = PromptReuse([])
        for fetcher in self.fetchers:
            fetcher.close()
        self.fetchers = []
        for factory in self.factories:
            factory.close()
        self.factories = []
        self.prompts: Any = None
        self.why_no_images: str | None = None
        self._limits.close()
        super().reset()

    @property
    def described(self) -> LoadedModel:
        """The loaded model, where there is one."""
        assert self.loaded is not None, "a model is loaded"
        return self.loaded

    def check(self, key: ModelKey) -> None:
        """Load a model, its adapter and its draft model without memory for weights. It downloads
        them if necessary. Any thread may call this.

        Raises:
            APIError: 404, one of them cannot be loaded; `param` says which.
        """
        model, adapter, draft = key
        assert model is not None, "there is a name to check"
        lazily = partial(load, model, **self._how_to_load, lazy=True)
        with _loading("model", model):
            if self._refusal_of_mlx_vlm(*key) is None:
                loading_with_mlx_vlm().load_model(downloaded(model), **self._how_to_load, lazy=True)
                return
            lazy_model, tokenizer = lazily()[:2]
        if adapter is not None:
            with _loading("adapters", adapter):
                lazily(adapter_path=adapter)
        with _loading("draft_model", draft):
            load_draft_model(draft, lazy_model, model, tokenizer, lazy=True)

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

    def release_unused(self, is_idle: bool) -> None:
        """Release the blocks of dropped caches, and if no request is left, the memory of those that
        nobody needs. Pools do that at their next steps, which on an idle server may be much
        later."""
        for factory in self.factories:
            factory.stats()
            if is_idle:
                factory.pool.release_unused()

    def _load(self, model: Any, adapter: Any = None, draft: Any = None) -> None:
        refusal = self._refusal_of_mlx_vlm(model, adapter, draft)
        if refusal is None:
            # What mlx-lm's provider does for its own models.
            self.reset()
            gc.collect()
            mx.clear_cache()
            loading = loading_with_mlx_vlm()
            made = loading.load_model(downloaded(model), **self._how_to_load)
            self.model, self.tokenizer, self.prompts = made.model, made.tokenizer, made.prompts
            self.is_batchable = made.model.is_batchable
        else:
            super()._load(model, adapter)  # type: ignore[no-untyped-call]  # mlx-lm's
            if self.ranks.size > 1 or self.options.cache.reproducible:
                # Other ranks get the tokens of a prompt, and not its images; and prompts with
                # images are not cut at pages.
                self.processor = None
            self.why_no_images = refusal if self.processor is None else None
        if self.ranks.size > 1:
            # Each rank samples its tokens itself.
            mx.random.seed(self.ranks.broadcast("seed", secrets.randbits(32)))
        try:
            self.model_key = (model, adapter, draft)
            loaded: Any = self.model
            self.draft_model = load_draft_model(draft, loaded, model, self.tokenizer)
            self._make_factories()
            limit = freed_buffers_limit(self.model, self.prompt_step)
            self._limits.enter_context(limited_freed_buffers(limit))
            shared = self.options.draft_shared_tokens
            self.draft = make_draft(draft, self.draft_model, self.factories, shared_tokens=shared)
            self.loaded = self._describe()
        except BaseException:
            # Else mlx-lm would take the model for loaded next time, and serve it without pages.
            self.reset()
            raise

    def _refusal_of_mlx_vlm(
        self, model: str | None, adapter: str | None, draft: str | None
    ) -> str | None:
        """Why mlx-vlm does not load a model, as a client that sends an image is told."""
        if self.ranks.size > 1:
            return "this server reads no images, as several processes share its model"
        if self.options.cache.reproducible:
            return (
                "this server reads no images, as it is reproducible: prompts with images are not "
                "computed in fixed steps"
            )
        assert model is not None, "there is a name to load"
        options = {"--draft-model": draft, "--adapter-path": adapter}
        return refusal_of_mlx_vlm(load_config(downloaded(model)), options)

    def _describe(self) -> LoadedModel:
        options = self.options
        limits = options.prompt_cache_size, options.prompt_cache_bytes, options.held_share
        self.reuse = PromptReuse(self.factories, *limits)
        pools = [each.pool for each in self.factories]
        key: Any = self.model_key
        tokenizer: Any = self.tokenizer
        model: Any = self.model
        # mlx-lm cannot batch some caches that a factory can.
        can_batch = self.is_batchable or (
            self.draft is None and is_separate(model, self.factories[0].make_cache())
        )
        # Nothing else: each of several ranks downloads its own part of the weights.
        config = load_config(downloaded(key[0], allow_patterns=["*.json"]))
        # transformers would warn of "indexing errors" in long texts; MLX's models have none.
        tokenizer.model_max_length = 1 << 60
        # Tokenizers change their settings at the first use; after it any thread may use them.
        tokenizer.encode("")
        # Of a step that is never evaluated.
        logits = model(mx.array([[0]]), cache=stock_make_prompt_cache(model))
        vocab_size = int(logits.shape[-1])
        marks: dict[int, str] = {}
        if self.prompts is not None:
            marks = self.prompts.marks
        elif self.processor is not None:
            mark = self.processor.image_token
            marks = {tokenizer.convert_tokens_to_ids(mark): mark}
        if options.cache.reproducible and not can_batch:
            raise NotReproducible(
                f"--reproducible is not possible: {key[0]} runs one request at a time, and its "
                "prompt is cut where others part from it: leave --reproducible out"
            )
        return LoadedModel(
            key=key,
            tokenizer=tokenizer,
            processor=self.processor,
            prompts=self.prompts,
            media_marks=marks,
            why_no_images=self.why_no_images,
            vocab_size=vocab_size,
            context_length=context_length(config),
            is_batchable=can_batch,
            has_states=any(each.prefixes.has_states for each in self.factories),
            at_pages=any(each.store for each in self.factories)
            or any(pool.quantises or pool.is_reproducible for pool in pools),
            text_machine=make_text_state_machine(tokenizer),
            callless_machine=callless_machine(tokenizer),
            roles=roles_of(tokenizer, options.chat_template_args),
            grammars=ModelGrammars(tokenizer, vocab_size),
            kept_tokens=kept_tokens_of(tokenizer),
        )

    def _make_factories(self) -> None:
        options = self.options
        models = [each for each in (self.model, self.draft_model) if each is not None]
        with budget_named(options):
            self.factories = divided_factories(models, options.cache, dtype=options.dtype)
        warn_of_slow_products(models[0], in_command=True)
        steps = [factory.prompt_step or options.prefill_step_size for factory in self.factories]
        self.prompt_step = min(options.prefill_step_size, *steps)
        for factory in self.factories:
            # This makes it learn the size of a block, which promises are computed from.
            with budget_named(options):
                factory.can_admit(0)
            factory.install()
        store = self.factories[0].store
        # Several ranks must find the same, so they look for it together.
        if store is not None and store.servers and self.ranks.size == 1:
            own, *drafting = self.factories
            handing = PromptFetcher(own, self._other, options.prefill_over)
            self.fetchers = [handing, *map(PromptFetcher, drafting)]


@contextmanager
def _loading(field: str, name: str | None) -> Iterator[None]:
    """Blame errors on the field of a request that names what is loaded."""
    try:
        yield
    except Exception as error:
        message = f"{field}={shortened(name)} cannot be loaded: {error}"
        raise APIError(404, message, param=field, code="model_not_found") from error


def loading_with_mlx_vlm() -> Any:
    """The module that loads models with mlx-vlm. Raises ValueError without the extra vlm."""
    return extra_module("paged_kv.integrations.mlx_vlm.image_generation", "vlm")


def refusal_of_mlx_vlm(config: dict[str, Any], mlx_lm_options: dict[str, Any]) -> str | None:
    """Why mlx-vlm does not load a model with this config, as a client that sends an image is told;
    None if it does. It loads what mlx-lm does not know, or would load without a part that sees
    images. The options are those that only models of mlx-lm take, and their values or None.

    Raises:
        ValueError: mlx-lm does not know the model, and mlx-vlm is missing, does not know it either,
            or does not take an option.
    """
    # A checkpoint with a "model_file" brings its own code.
    kind, is_known = config.get("model_type"), "model_file" in config or knows_model(config)
    if is_known and (kind in PROCESSORS or "vision_config" not in config):
        return "this model takes no images: send text only"

    def refusal(reason: str, error: str) -> str:
        if not is_known:
            raise ValueError(error)
        return f"this server reads no images, as {reason}"

    if find_spec("mlx_vlm") is None:
        return refusal(
            "the extra for them is not installed: pip install 'paged-kv[vlm]' where it runs, or "
            "send text only",
            f"mlx-lm has no model of the type {kind!r}: a newer one may (pip install --upgrade "
            f"mlx-lm), and mlx-vlm if the model reads images ({install_command('vlm')})",
        )
    if not loading_with_mlx_vlm().knows(config):
        return refusal(
            f"mlx-vlm has no model of the type {kind!r}: send text only",
            f"neither mlx-lm nor mlx-vlm has a model of the type {kind!r}: newer ones may (pip "
            "install --upgrade mlx-lm mlx-vlm)",
        )
    if used := [option for option, value in mlx_lm_options.items() if value is not None]:
        return refusal(
            f"it was started with {used[0]}: send text only",
            f"{used[0]} does not work with models of mlx-vlm, and mlx-lm has none of the type "
            f"{kind!r}: leave it out",
        )
    return None
