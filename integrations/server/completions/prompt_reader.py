"""Turns prompts from clients into tokens, with mlx-lm's chat templates and segments.

This takes time, so two threads do it: one for short bodies and one for long bodies, so that short
ones do not wait for long ones.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm import server

from paged_kv.integrations.batching.shared_prefill import cut_for_snapshots
from paged_kv.integrations.server.completions.message_parts import image_files, require_parts
from paged_kv.integrations.server.generation.embedded_images import EmbeddedImages
from paged_kv.integrations.server.generation.jobs import Prompt
from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel
from paged_kv.integrations.server.http.api_errors import APIError, wrong_value
from paged_kv.integrations.server.http.schema import ChatBody

Made = TypeVar("Made")

# stdlib-llama's tokenizer takes a fifth of a second for so many; most prompts are shorter.
LONG_BODY_BYTES = 200_000


class ReaderThreads:
    """Runs slow work in the order of its arrival."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="paged-kv-read-short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="paged-kv-read-long")

    async def run(self, work: Callable[[], Made], body_bytes: int) -> Made:
        """Run `work` on a thread and return its result."""
        threads = self._long if body_bytes > LONG_BODY_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """Cancel work that has not begun."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


def read_text(loaded: LoadedModel, prompt: str | Sequence[int]) -> Prompt:
    """The prompt of a completion.

    Raises:
        APIError: 400, it has no tokens, or tokens that the model does not know.
    """
    tokens = loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return _checked(loaded, Prompt(tokens, [tokens]), "prompt")


def read_chat(loaded: LoadedModel, body: ChatBody, options: argparse.Namespace) -> Prompt:
    """The prompt of a conversation.

    Raises:
        APIError: 400, the model's chat template refuses it, or its images cannot be read.
    """
    _require_template_kwargs(loaded, body.chat_template_kwargs or {})
    messages = deepcopy(body.messages)
    require_parts(
        messages, why_no_images=loaded.why_no_images, urls_allowed=options.allow_image_urls
    )
    try:
        prompt = _read(loaded, body, messages, options)
    except APIError:
        raise
    except Exception as error:
        raise wrong_value(
            f"these messages do not fit the chat template of the model: {error}", "messages"
        ) from error
    return _checked(loaded, prompt, "messages")


def _read(
    loaded: LoadedModel, body: ChatBody, messages: list[Any], options: argparse.Namespace
) -> Prompt:
    has_images = any(server._image_parts(messages))
    if has_images:
        server._inline_image_urls(messages)
    if has_images and loaded.prompts is not None:
        return _with_images(loaded, body, messages, options)
    tokens, segments, _, state, vision = _tokenized(loaded, body, messages, options)
    if vision is None:
        return Prompt(tokens, segments, state)
    # Evaluate here: the generation thread cannot. See `ThreadConflict`.
    mx.eval(vision.pixel_values)
    return Prompt(tokens, segments, state, EmbeddedImages(tokens, vision))


def _with_images(
    loaded: LoadedModel, body: ChatBody, messages: list[Any], options: argparse.Namespace
) -> Prompt:
    """The prompt of a conversation with images, for a model of mlx-vlm."""
    files = image_files(messages)
    server.process_message_content(messages, keep_images=True)
    variables = {**options.chat_template_args, **(body.chat_template_kwargs or {})}
    media = loaded.prompts.chat(messages, files, tools=body.tools or None, **variables)
    tokens, end = media.tokens, media.media_end
    segments = [tokens[:end], tokens[end:]]
    return Prompt(tokens, segments, _initial_state(loaded.tokenizer, tokens), media)


def _initial_state(tokenizer: Any, tokens: list[int]) -> str:
    """Whether the model goes on with reasoning, as mlx-lm's server finds it out for texts."""
    is_open = tokenizer.has_thinking and (
        tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
    )
    return str(tokenizer.response_initial_state or ("reasoning" if is_open else "normal"))


def _tokenized(
    loaded: LoadedModel, body: ChatBody, messages: list[Any], options: argparse.Namespace
) -> Any:
    request = server.CompletionRequest("chat", "", messages, body.tools or None, body.role_mapping)
    # mlx-lm's method uses only these attributes.
    provider = SimpleNamespace(processor=loaded.processor, cli_args=options)
    generator: Any = SimpleNamespace(model_provider=provider)
    return server.ResponseGenerator._tokenize(
        generator,
        loaded.tokenizer,
        request,
        SimpleNamespace(chat_template_kwargs=body.chat_template_kwargs),
    )


def _require_template_kwargs(loaded: LoadedModel, named: dict[str, Any]) -> None:
    """Raise APIError unless the names are variables of the template: as the tokenizer's own
    arguments they could do anything."""
    render = loaded.tokenizer._tokenizer.apply_chat_template
    parameters = inspect.signature(render).parameters.values()
    own = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    for name in named:
        if name in own - {"documents"} or not name.isidentifier():
            raise wrong_value(
                f"chat_template_kwargs.{name} is not a variable of templates: leave it out",
                f"chat_template_kwargs.{name}",
            )


def _checked(loaded: LoadedModel, prompt: Prompt, param: str) -> Prompt:
    tokens = prompt.tokens
    if not isinstance(tokens, list) or not tokens:
        raise wrong_value("the prompt has no tokens: give at least one", param)
    if not 0 <= min(tokens) <= max(tokens) < loaded.vocab_size:
        raise wrong_value(
            f"token ids from {min(tokens)} to {max(tokens)} were given, and the model knows those "
            f"from 0 to {loaded.vocab_size - 1}",
            param,
        )
    if loaded.prompts is not None and not loaded.is_batchable and prompt.media is None:
        prompt = replace(prompt, media=loaded.prompts.tokens(tokens))
    if loaded.has_states:
        prompt = replace(prompt, segments=cut_for_snapshots(prompt.segments))
    return prompt
