"""What is private in mlx-lm's generator and server, under names of ours. No other file names it.

A release of mlx-lm may change it without notice. So attributes are checked when this is imported,
and functions when they are first called: an error says what is missing, and which versions of
mlx-lm have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch

from paged_kv.allocator.errors import PagedKVError

KNOWN = "mlx-lm>=0.32.0,<=0.32.2"
"""The versions whose private parts are those below, as pyproject.toml asks for them."""


class MLXLMChanged(PagedKVError, ImportError):
    """mlx-lm lacks something private that paged_kv builds on."""

    def __init__(self, name: str) -> None:
        installed = version("mlx-lm")
        super().__init__(f"mlx-lm {installed} has no {name}: pip install '{KNOWN}'")


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
        raise MLXLMChanged(f"{path.replace(':', '.')}({', '.join(parameters)})")
    return found


class _Attribute:
    """An attribute that the constructor of a class sets, of the object that a view shows.

    Raises:
        MLXLMChanged: the constructor sets no such attribute.
    """

    def __init__(self, kind: Any, name: str) -> None:
        if name not in kind.__init__.__code__.co_names:
            raise MLXLMChanged(f"{kind.__name__}.{name}")
        self._name = name

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
        counters: what it has done so far, such as `prompt_tokens`.
    """

    waiting = _Attribute(BatchGenerator, "_unprocessed_sequences")
    reading = _Attribute(BatchGenerator, "_prompt_batch")
    processing = _Attribute(BatchGenerator, "_currently_processing")
    generating = _Attribute(BatchGenerator, "_generation_batch")
    counters = _Attribute(BatchGenerator, "_counters")

    def __init__(self, generator: Any) -> None:
        self.shown = generator

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
        matchers: of stop sequences.
    """

    current_tokens = _Attribute(GenerationBatch, "_current_tokens")
    current_logprobs = _Attribute(GenerationBatch, "_current_logprobs")
    next_tokens = _Attribute(GenerationBatch, "_next_tokens")
    next_logprobs = _Attribute(GenerationBatch, "_next_logprobs")
    token_context = _Attribute(GenerationBatch, "_token_context")
    num_tokens = _Attribute(GenerationBatch, "_num_tokens")
    matchers = _Attribute(GenerationBatch, "_matchers")

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
