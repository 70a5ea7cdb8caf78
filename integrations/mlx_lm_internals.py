"""What is private in mlx-lm's generator and server, and what its versions do differently, under
names of ours. No other file names it.

A release of mlx-lm may change it without notice. So attributes are checked when this is imported,
and functions when they are first called: an error says what is missing, and which versions of
mlx-lm have it. `trials` tries what no name shows.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.models import cache as mlx_lm_cache

from paged_kv.extras import MLXLMChanged


@cache
def _private(path: str, *parameters: str) -> Any:
    """A private function, by the path of its module or class, that has these parameters.

    Raises:
        MLXLMChanged: there is none.
    """
    module, *names = path.split(":")
    found: Any = import_module(module)
    for name in names:
        found = getattr(found, name, None)
    if found is None or not {*parameters} <= signature(found).parameters.keys():
        raise MLXLMChanged(f"has no {path.replace(':', '.')}({', '.join(parameters)})")
    return found


class _Attribute:
    """An attribute that the constructor of a class sets, of the object that a view shows.

    Args:
        kind: the class.
        names: what versions of mlx-lm call it, the newest first.

    Raises:
        MLXLMChanged: the constructor sets no such attribute.
    """

    def __init__(self, kind: Any, *names: str) -> None:
        found = [name for name in names if name in kind.__init__.__code__.co_names]
        if not found:
            raise MLXLMChanged(f"has no {kind.__name__}.{names[0]}")
        self._name = found[0]

    def __get__(self, view: Any, kind: type | None = None) -> Any:
        return getattr(view.shown, self._name)

    def __set__(self, view: Any, value: Any) -> None:
        setattr(view.shown, self._name, value)


class GeneratorParts:
    """The parts of a BatchGenerator.

    Attributes:
        waiting: the sequences that wait.
        reading: the batch whose prompts are being computed.
        processing: for each of these the segments that are left, what is computed, and how many
            tokens there are.
        generating: the batch that generates.
    """

    waiting = _Attribute(BatchGenerator, "_unprocessed_sequences")
    reading = _Attribute(BatchGenerator, "_prompt_batch")
    processing = _Attribute(BatchGenerator, "_currently_processing")
    generating = _Attribute(BatchGenerator, "_generation_batch")
    _counters = _Attribute(BatchGenerator, "_counters", "_prompt_tokens_counter")

    def __init__(self, generator: Any) -> None:
        self.shown = generator

    @property
    def prompt_tokens(self) -> int:
        """How many tokens of prompts it has computed so far."""
        counters: Any = self._counters
        count: int = getattr(counters, "prompt_tokens", counters)  # 0.31 has a number for each
        return count

    def put_in_line(self, waiting: Sequence[Any]) -> None:
        """Let these sequences wait, and no others."""
        self.waiting = deque(waiting)

    def place_of(self, uid: int) -> tuple[int, int]:
        """The stage of a sequence, 1 for prompts and 2 for those that generate, and its row."""
        find = _private("mlx_lm.generate:BatchGenerator:_find_uids", "uids")
        place: tuple[int, int] = find(self.shown, [uid])[uid]
        return place


class BatchParts:
    """The parts of a GenerationBatch, each with an entry for a row.

    Attributes:
        current_tokens: those that are emitted.
        current_logprobs: their log-probabilities.
        next_tokens: those that are sampled and not yet emitted: uint32, of shape (rows,).
        next_logprobs: their log-probabilities.
        token_context: the tokens that logits processors see.
        num_tokens: how many are emitted.
        stops: what sequences end with; those of prompts that are computed have it too.
        matchers: of stop sequences.
    """

    current_tokens = _Attribute(GenerationBatch, "_current_tokens")
    current_logprobs = _Attribute(GenerationBatch, "_current_logprobs")
    next_tokens = _Attribute(GenerationBatch, "_next_tokens")
    next_logprobs = _Attribute(GenerationBatch, "_next_logprobs")
    token_context = _Attribute(GenerationBatch, "_token_context")
    num_tokens = _Attribute(GenerationBatch, "_num_tokens")
    stops = _Attribute(GenerationBatch, "stop_sequences", "state_machines")
    matchers = _Attribute(GenerationBatch, "_matchers", "_matcher_states")

    def __init__(self, batch: Any) -> None:
        self.shown = batch

    @property
    def sampled(self) -> tuple[Any, ...]:
        """The tokens that are emitted and those that follow, with their log-probabilities."""
        current = self.current_tokens, self.current_logprobs
        return (*current, self.next_tokens, self.next_logprobs)

    @sampled.setter
    def sampled(self, sampled: tuple[Any, ...]) -> None:
        self.current_tokens, self.current_logprobs, self.next_tokens, self.next_logprobs = sampled


class SteppedBatch(GenerationBatch):
    """mlx-lm's GenerationBatch, with a step that classes below may change."""

    @property
    def parts(self) -> BatchParts:
        """Its parts."""
        return BatchParts(self)

    def step(self) -> Any:
        """mlx-lm's step."""
        return super()._step()

    def _step(self) -> Any:
        return self.step()


Step = Callable[[GenerationBatch], tuple[list[int], list[mx.array]]]
STOCK_STEP: Step = _private("mlx_lm.generate:GenerationBatch:_step", "self")
"""GenerationBatch's step."""


def next_of(generator: Any) -> Any:
    """What `BatchGenerator.next` returns, without what it measures."""
    return _private("mlx_lm.generate:BatchGenerator:_next", "self")(generator)


def set_next(generator: BatchGenerator, step: Callable[[], Any]) -> None:
    """Let one BatchGenerator take this step instead."""
    setattr(generator, _private("mlx_lm.generate:BatchGenerator:_next", "self").__name__, step)


def downloaded(model: str, allow_patterns: list[str] | None = None) -> Path:
    """The folder of a model, downloaded if it is a repository; with patterns, these files of it."""
    download = _private("mlx_lm.utils:_download", "path_or_hf_repo", "allow_patterns")
    folder: Path = download(model, allow_patterns=allow_patterns)
    return folder


def knows_model(config: dict[str, Any]) -> bool:
    """Whether mlx-lm has a file for models of this configuration."""
    try:
        _private("mlx_lm.utils:_get_classes", "config")(config)
    except (KeyError, ValueError):
        return False
    return True


def logits_processors(arguments: Any) -> list[Any]:
    """The logits processors of the GenerationArguments of mlx-lm's server."""
    made: list[Any] = _private("mlx_lm.server:_make_logits_processors", "args")(arguments)
    return made


def tokenized(
    tokenizer: Any, processor: Any, request: Any, options: Any, template: dict[str, Any] | None
) -> Any:
    """What mlx-lm's server makes of a chat.

    Args:
        tokenizer: mlx-lm's.
        processor: of the model's images; None without.
        request: mlx-lm's `CompletionRequest`.
        options: of the server.
        template: variables of the chat template.
    """
    tokenize = _private("mlx_lm.server:ResponseGenerator:_tokenize", "tokenizer", "request", "args")
    # The method uses only these attributes of its server and of the request's arguments.
    provider = SimpleNamespace(processor=processor, cli_args=options)
    arguments = SimpleNamespace(chat_template_kwargs=template)
    return tokenize(SimpleNamespace(model_provider=provider), tokenizer, request, arguments)


_HAS_META_STATE = hasattr(mlx_lm_cache.KVCache, "meta_state")
"""Whether the arrays of caches are saved apart from all else that they hold, as in 0.31."""


def content_of(cache: Any) -> Any:
    """All that one of mlx-lm's caches holds: a tree of arrays, numbers, strings and None."""
    return (cache.state, cache.meta_state) if _HAS_META_STATE else cache.state


def cache_with(kind: Any, content: Any) -> Any:
    """A cache of a class of mlx-lm that holds a `content_of`."""
    return kind.from_state(*content) if _HAS_META_STATE else kind.from_state(content)


def let_load(kind: Any) -> None:
    """Let mlx-lm save and load prompt caches with a class that has a `state` and `from_state` as
    mlx-lm 0.32 defines them."""
    # Classes are looked up by name in mlx-lm's own module.
    setattr(mlx_lm_cache, kind.__name__, kind)
    if _HAS_META_STATE:
        _save_arrays_apart(kind)


def _save_arrays_apart(kind: Any) -> None:
    """Let `state` be the arrays of a class's state, and `meta_state` the rest as JSON."""
    stock, restore = vars(kind).get("state"), vars(kind).get("from_state")
    if stock is None:
        return  # a class that it derives from has both

    def from_state(kind: Any, arrays: list[mx.array], rest: str) -> Any:
        held = iter(arrays[1:])
        leaves = [(path, *(leaf or [next(held)])) for path, *leaf in json.loads(rest)]
        state: Any = tree_unflatten(leaves)
        if restore is not None:
            return restore.__func__(kind, state)
        cache = kind.__new__(kind)
        stock.fset(cache, state)
        return cache

    kind.state = property(lambda self: _apart(stock.fget(self))[0], stock.fset)
    kind.meta_state = property(lambda self: _apart(stock.fget(self))[1])
    kind.from_state = classmethod(from_state)


def _apart(state: Any) -> tuple[list[mx.array], str]:
    """The arrays of a tree, behind one without which a layer might not be in the file; and as JSON
    the path of each leaf, with the leaf if it is no array."""
    leaves: Any = tree_flatten(state)
    arrays, rest = [mx.zeros(1)], []
    for path, leaf in leaves:
        if isinstance(leaf, mx.array):
            arrays.append(leaf)
            rest.append([path])
        else:
            # The text of a `ModelIdentity` is what its iterator gives.
            rest.append([path, "".join(leaf) if isinstance(leaf, str) else leaf])
    return arrays, json.dumps(rest)
