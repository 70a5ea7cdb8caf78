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
from types import SimpleNamespace
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm import server

from paged_kv.integrations.batching.shared_prefill import cut_for_snapshots
from paged_kv.integrations.server.generation.jobs import Prompt
from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel
from paged_kv.integrations.server.http.api_errors import wrong_value
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
        APIError: 400, the model's chat template refuses it.
    """
    _require_template_kwargs(loaded, body.chat_template_kwargs or {})
    messages = deepcopy(body.messages)
    _require_images(messages, loaded, options.allow_image_urls)
    try:
        tokens, segments, _, state, vision = _tokenized(loaded, body, messages, options)
    except Exception as error:
        raise wrong_value(
            f"these messages do not fit the chat template of the model: {error}", "messages"
        ) from error
    if vision is not None:
        # Evaluate here: the generation thread cannot. See `ThreadConflict`.
        mx.eval(vision.pixel_values)
    return _checked(loaded, Prompt(tokens, segments, state, vision), "messages")


def _tokenized(
    loaded: LoadedModel, body: ChatBody, messages: list[Any], options: argparse.Namespace
) -> Any:
    if options.allow_image_urls and loaded.processor is not None:
        server._inline_image_urls(messages)
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


def _require_images(messages: list[Any], loaded: LoadedModel, urls_allowed: bool) -> None:
    for part in server._image_parts(messages):
        url = server._image_url(part)
        if loaded.processor is None:
            raise wrong_value("this model takes no images: send text only", "messages")
        if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
            raise wrong_value("an image must be given as a data URL", "messages")
        if not (url.startswith("data:") or urls_allowed):
            raise wrong_value(
                "this server fetches no images: send a data URL, or start it with "
                "--allow-image-urls",
                "messages",
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
    if not loaded.has_states:
        return prompt
    segments = cut_for_snapshots(prompt.segments)
    return Prompt(tokens, segments, prompt.initial_state, prompt.vision)
