"""A model whose layers keep pages: what it writes, who reads it, and what is replaced in it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from mlx.nn.layers.base import Module
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.cache.paged_kv_cache import PagedChunkedKVCache, PagedKVCache
from paged_kv.integrations.attention_hook import ATTENTION, OPERATIONS
from paged_kv.integrations.batch_steps import BATCH_STEPS
from paged_kv.integrations.cache_library import (
    language_model,
    library_of,
    model_file,
    require_model,
)
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.compiled.recordings import Recordings, compiles
from paged_kv.integrations.distributed.sharded_model import agreed_budget, ranks_of
from paged_kv.integrations.heads.model_head import ModelHead, heads
from paged_kv.integrations.heads.prediction_head import PredictionHead
from paged_kv.integrations.model_calls import compile_steps, hook_calls
from paged_kv.integrations.model_hooks import ModelHooks, modules_of
from paged_kv.integrations.model_trial import Trial, trial_of_rows, try_out
from paged_kv.integrations.model_version import ModelVersion
from paged_kv.integrations.slow_products import warn_of_slow_products
from paged_kv.integrations.states.counted_states import known_states
from paged_kv.integrations.states.layer_rows import GrowingLayer
from paged_kv.kernels.pages.page_format import FP16, PageLayout
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.sequence import Sequence


class PagedModel:
    """A model, and what the pools of its layers have to know of it.

    Args:
        model: of mlx-lm or mlx-vlm, as a whole or its language model.
        options: of its caches.
        head: a prediction head of the model, whose layer comes behind the model's; None for none.

    Raises:
        TypeError: mlx-lm can make no prompt caches for it, or `compile` is no bool.
        ValueError: a package that its library needs is not installed; the head is of another
            model; an option is wrong for a model that several processes share; or
            PAGED_KV_COMPILE is neither 0 nor 1.

    Attributes:
        module: the language model.
        file: the name of the model's file in its library.
        library: its library.
        version: numbers its versions.
        ranks: the processes that share the model, if it is sharded.
        recordings: the recorded steps of each pool, if steps are compiled.
        head: see above.
        pool: that of caches without a bound.
        pools: all of them, by the bounds of their caches; those of bounds go with their caches, but
            for the latest one, whose steps are recorded.
    """

    def __init__(
        self,
        model: Any,
        options: CacheOptions,
        head: PredictionHead | None = None,
    ) -> None:
        self.module: Module = language_model(model)
        require_model(self.module)
        warn_of_slow_products(self.module)
        self.file = model_file(self.module)
        # Pages of images depend on the parts that see them, too.
        self.version = ModelVersion(model)
        self.recordings: WeakKeyDictionary[PagePool, Recordings] = WeakKeyDictionary()
        self.head = None if head is None else ModelHead(self.module, head)
        self.library = library_of(self.module)
        self.ranks = ranks_of(self.module)
        if options.offload is not None and self.ranks.size > 1:
            raise ValueError(
                f"offload is for a model in one process, and {self.ranks.size} share this one: "
                "leave it out"
            )
        max_bytes = agreed_budget(options.max_bytes, self.ranks)
        self._options = replace(options, max_bytes=max_bytes)
        self._hooks = ModelHooks()
        self._trial: Trial | None = None
        self.pools: WeakValueDictionary[int | None, PagePool] = WeakValueDictionary()
        self.pool = self._latest_pool = self.pools[None] = self._new_pool(None)

    def _new_pool(self, max_kv_size: int | None) -> PagePool:
        """A pool for the layers of this model, with a budget of its own or that of the first."""
        paged: list[Any] = []
        self.library.layers(self.module, paged.append, max_kv_size)
        windows = {
            layer: window
            for layer, cache in enumerate(paged)
            if (window := self.library.window_of(cache, self._options.write_chunk)) is not None
        }
        rows = {at: each.rows for at, each in enumerate(paged) if isinstance(each, GrowingLayer)}
        layers = len(paged) + (self.head is not None)
        beside = self.pools.get(None)
        options = self._options if beside is None else replace(self._options, max_bytes=None)
        pool = PagePool(layers, options, windows=windows, rows=rows, beside=beside, name=self.file)
        if self.head is not None:
            heads[pool] = self.head
        self._compiles = compiles(self._options.compile, pool.backend)
        if self._options.reproducible:
            self._compiles = False  # recorded steps may round in other ways
        elif self._compiles is None and self.ranks.size > 1:
            self._compiles = False  # each would decide by its own times, and take other steps
        pool.hooks, pool.versions = self._hooks, self.version
        pool.is_reproducible = self._options.reproducible
        if self._trial is not None:
            self._set_attending(pool, self._trial)
        return pool

    def pool_for(self, max_kv_size: int | None) -> PagePool:
        """The pool of the caches with this bound; all pools share one budget."""
        if max_kv_size is None:
            return self.pool
        pool = self.pools.get(max_kv_size) or self._new_pool(max_kv_size)
        self.pools[max_kv_size] = self._latest_pool = pool
        return pool

    def new_cache(self, pool: PagePool, max_kv_size: int | None = None) -> list[Any]:
        """A prompt cache of a new sequence."""
        sequence, layers = Sequence(pool), count()
        sequence.model_version = self.version.number

        def paged(cache: Any) -> Any:
            is_chunked = isinstance(cache, self.library.chunked)
            kind = PagedChunkedKVCache if is_chunked else PagedKVCache
            return kind(pool, next(layers), [sequence])

        made = self.library.layers(self.module, paged, max_kv_size)
        if self.head is not None:
            made.append(PagedKVCache(pool, next(layers), [sequence]))
        return made if pool.num_layers else known_states(made, pool)

    def replace_calls(self) -> None:
        """Let calls of the model, and mlx-lm's steps of batches, do what those do not."""
        batches = [PromptProcessingBatch, GenerationBatch]
        self._hooks.add("batches", partial(BATCH_STEPS.install, batches))
        self._hooks.add("calls", partial(hook_calls, type(self.module)))
        if self.head is not None:
            self._hooks.add("hidden states", self.head.hook)

    def try_out(self) -> Trial:
        """The trial of the model, which runs once.

        Raises:
            PoolExhausted: the budget of its pools does not hold a page of every layer.
        """
        if self._trial is None:
            pool, modules = self.pool, list(modules_of(self.module))
            if self.head is not None:
                modules += [each for each in modules_of(self.head.head) if each not in modules]
            self._hooks.add("attention", partial(ATTENTION.install, modules))
            own_attention = self.library.own_attention.get(self.file)
            if own_attention is not None:
                self._hooks.add("own attention", partial(own_attention().install, modules))
            self._hooks.add("operations", partial(OPERATIONS.install, modules))
            if pool.rows:
                trial = trial_of_rows(pool.rows)
            else:
                trial = try_out(self.module, partial(self.library.layers, self.module))
            if self.head is not None:
                trial.add_layer(pool.num_layers - 1, self.head.geometry)
            if not trial.prepares:
                self._hooks.remove("operations")
            # The budget must hold a page of every layer, as it is while it is written.
            layouts = [PageLayout(FP16, geometry) for geometry in trial.geometries.values()]
            least, budget = sum(each.page_bytes for each in layouts), pool.budget.max_bytes
            if budget < least:
                raise PoolExhausted(1, 0, 0, budget, least, sufficient_budget=least)
            self._trial = trial
            for each in self.pools.values():
                self._set_attending(each, trial)
        return self._trial

    def open_layers(self, pool: PagePool) -> None:
        """Tell a pool the geometry of all layers, if it knows none.

        Raises:
            PoolExhausted: as for `try_out`.
        """
        if pool.is_open:
            return
        trial = self.try_out()
        with pool.lock:
            for layer, geometry in trial.geometries.items():
                pool.group_of(layer).open_layer(layer, geometry)
            for group in pool.groups:
                group.record_second_step()

    def close(self) -> None:
        """Let what is replaced go with the last sequence of these pools."""
        self._hooks = ModelHooks()
        for pool in self.pools.values():
            pool.hooks = None

    def _set_attending(self, pool: PagePool, trial: Trial) -> None:
        if not self._options.always_gather:
            pool.attending, pool.attends_in_order = trial.attending, trial.in_order
            pool.attending_in_decode = trial.attending_in_decode
        if self._compiles is not False and not pool.rows:
            on_trial = self._compiles is None
            self.recordings[pool] = compile_steps(self.version, pool, on_trial=on_trial)
