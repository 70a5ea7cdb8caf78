"""Tells which library and file a model is of, and which of its cache classes pages replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.checks import described
from paged_kv.extras import extra_module
from paged_kv.integrations.batching.prompt_caches import is_list, replaced
from paged_kv.integrations.model_hooks import Hooks, Replacements
from paged_kv.integrations.prompt_cache_hook import MLX_LM_HOOKS, stock_make_prompt_cache
from paged_kv.integrations.states.layer_rows import GrowingLayer, LayerRows, growing_layers
from paged_kv.pool.layer_kinds import DEFAULT_WRITE_CHUNK, Window

Paged = Callable[[Any], Any]
"""Makes what takes the place of one of the library's caches."""

LayerCache = Callable[[Any, Paged], Any]
"""Makes the cache of a layer, of the library's and of `Paged`."""


@dataclass(frozen=True)
class CacheLibrary:
    """The prompt caches of mlx-lm, or of mlx-vlm.

    Attributes:
        name: its name.
        make_prompt_cache: makes a model's own caches; takes the model and `max_kv_size`.
        full: the class of layers that hold every token.
        window: the class of layers that hold the latest tokens.
        chunked: the class of layers that attend by chunks.
        unpaged: the names, with modules, of classes that stay as they are: those of recurrent
            layers, and those whose content no page can hold.
        hooks: replace the library's functions while a factory is installed.
        indexed: of model files whose layers have an indexer, which keeps something beside keys and
            values: what makes a layer's cache.
        own_attention: of model files that attend by a function of their own: makes what takes its
            place.
        growing: the parts of each of a model's caches that append rows, see `growing_layers`.
    """

    name: str
    make_prompt_cache: Callable[..., list[Any]]
    full: type[Any]
    window: type[Any]
    chunked: type[Any]
    unpaged: frozenset[str]
    hooks: Hooks
    indexed: Mapping[str, LayerCache]
    own_attention: Mapping[str, Callable[[], Replacements]] = field(default_factory=dict)
    growing: tuple[list[GrowingLayer], ...] = ()

    def layers(self, model: Module, paged: Paged, max_kv_size: int | None = None) -> list[Any]:
        """The library's prompt cache, with `paged(cache)` in the place of each that is paged, or
        `paged(part)` for each `GrowingLayer` of one that appends rows.

        Raises:
            TypeError: a cache is of a class that is not known: what it holds might be lost.
        """
        if self.growing:
            return [LayerRows(*map(paged, parts)) for parts in self.growing]
        layer = self.indexed.get(model_file(model), self._replaced)
        return [layer(cache, paged) for cache in self.make_prompt_cache(model, max_kv_size)]

    def window_of(self, cache: Any, write_chunk: int | None) -> Window | None:
        """The window of the layer of a cache that can be paged, if it has one.

        In a layer that attends by chunks, no query sees a token that is a chunk's length or more
        before it; the model's own mask hides the rest.

        Raises:
            ValueError: the cache holds only its sink tokens.
        """
        if isinstance(cache, GrowingLayer):
            if cache.window is None:
                return None
            size, sink_tokens = cache.window, 0
        elif isinstance(cache, self.chunked):
            size, sink_tokens = cache.chunk_size, 0
        elif isinstance(cache, self.window):
            size, sink_tokens = cache.max_size - cache.keep, cache.keep
        else:
            return None
        if size < 1:
            raise ValueError(
                f"max_kv_size={cache.max_size} must be more than the {cache.keep} sink tokens, "
                "which are always kept"
            )
        chunk = min(DEFAULT_WRITE_CHUNK, size) if write_chunk is None else write_chunk
        return Window(size, chunk, sink_tokens)

    def _replaced(self, cache: Any, paged: Paged) -> Any:
        return replaced(cache, lambda each: paged(each) if self._is_paged(each) else each)

    def _is_paged(self, cache: object) -> bool:
        if type(cache) in (self.full, self.window, self.chunked):
            return True
        names = [f"{each.__module__}.{each.__qualname__}" for each in type(cache).__mro__]
        if self.unpaged.isdisjoint(names):
            raise TypeError(
                f"{self.name} keeps a {names[0]} for a layer of this model, and paged_kv does not "
                f"know this class: use {self.name}'s own caches for the model"
            )
        return False


def _beside_indexer(cache: Any, paged: Paged) -> Any:
    """The cache of a layer that pairs it with one for an indexer's keys, whose arrays the model
    reads and replaces itself."""
    if not is_list(cache):
        return paged(cache)
    first, *others = cache.caches
    return type(cache)(paged(first), *others)


MLX_LM = CacheLibrary(
    name="mlx-lm",
    make_prompt_cache=stock_make_prompt_cache,
    full=KVCache,
    window=RotatingKVCache,
    chunked=ChunkedKVCache,
    unpaged=frozenset({"mlx_lm.models.cache.ArraysCache"}),
    hooks=MLX_LM_HOOKS,
    indexed=dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl"), _beside_indexer),
)


def require_model(model: object) -> None:
    """Raises TypeError unless mlx-lm can make prompt caches for the model."""
    if isinstance(model, Module) and (hasattr(model, "make_cache") or hasattr(model, "layers")):
        return
    advice = ": load() returns a model and its tokenizer" if isinstance(model, tuple) else ""
    raise TypeError(
        "model must be a model of mlx-lm, such as mlx_lm.load(path_or_repo)[0], got "
        f"{described(model)}{advice}"
    )


def library_of(model: Module) -> CacheLibrary:
    """The library that a model is of; mlx-lm for all that are not mlx-vlm's.

    Raises:
        ValueError: a package that mlx-vlm needs is not installed.
    """
    if not _is_of_mlx_vlm(model):
        return replace(MLX_LM, growing=tuple(growing_layers(model, stock_make_prompt_cache(model))))
    library: CacheLibrary = extra_module("paged_kv.integrations.mlx_vlm.hooks", "vlm").MLX_VLM
    return library


def language_model(model: Any) -> Any:
    """The part of a model of mlx-vlm that has the caches, or the model itself."""
    is_whole = _is_of_mlx_vlm(model) and hasattr(model, "language_model")
    return model.language_model if is_whole else model


def _is_of_mlx_vlm(model: object) -> bool:
    """Whether this is mlx-vlm's, or a `TextModel` of paged_kv.integrations.mlx_vlm."""
    return "mlx_vlm" in type(model).__module__.split(".")


def model_file(model: Module) -> str:
    """The name of the model's file in mlx-lm, or of its folder in mlx-vlm, such as "llama"."""
    whole = getattr(model, "whole", model)  # of a `TextModel`
    parts = type(whole).__module__.split(".")
    return parts[2] if parts[:2] == ["mlx_vlm", "models"] else parts[-1]
