"""Turns prompts into tokens and back for clients, in the form that vLLM's clients know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from pydantic import Field, StrictInt
from starlette.types import Send

from paged_kv.server.completions.handler import CompletionHandler, json_bytes, send_json
from paged_kv.server.completions.interface import APIRequest, Object, Reader
from paged_kv.server.completions.request_state import RequestState
from paged_kv.server.completions.service import Service
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.api_errors import busy, wrong_value
from paged_kv.server.http.request_body import checked, parse_body, parsed_json
from paged_kv.server.http.schema import Body, BodyFields, ChatBody, Name, TextBody
from paged_kv.server.options import ServerOptions

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


class TokenizedText(TextBody):
    """A body of /tokenize with a prompt."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizedChat(ChatBody):
    """A body of /tokenize with messages: their chat template adds the special tokens."""

    return_token_strs: bool | None = None


class DetokenizedBody(BodyFields):
    """A body of /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]


def read_tokenized(content: bytes, key: str | None) -> APIRequest:
    """What is to become tokens, of the bytes of a body.

    Raises:
        APIError: 400, something is wrong with it.
    """
    fields = parsed_json(content)
    if "messages" in fields:
        return APIRequest(checked(fields, TokenizedChat), len(content))
    body = checked(fields, TokenizedText)
    if not isinstance(body.prompt, str):
        raise wrong_value("prompt: a text is needed here", "prompt")
    return APIRequest(body, len(content))


def read_detokenized(content: bytes, key: str | None) -> APIRequest:
    """What is to become text, of the bytes of a body.

    Raises:
        APIError: 400, something is wrong with it.
    """
    body = parse_body(content, DetokenizedBody)
    prompt = TextBody.model_construct(model=body.model, prompt=body.tokens)
    return APIRequest(prompt, len(content), names={"prompt": "tokens"})


class PromptHandler(CompletionHandler):
    """Answers with what is asked of a prompt, as its completion would have it.

    Args:
        service: the server's shared parts.
        read: of the path's interface.
        describe: makes the answer of the request's body, the prompt's tokens and their model.
    """

    def __init__(
        self,
        service: Service,
        read: Reader,
        describe: Callable[[Body, list[int], LoadedModel], Object],
    ) -> None:
        super().__init__(service, read)
        self._describe = describe

    async def _answer(self, state: RequestState, send: Send) -> None:
        await self._make_ready(state)
        (job,) = state.jobs
        if job.prompt is None:
            # Another model reads it when it is loaded.
            job.arguments.max_tokens = 0
            with self._submitted(state.jobs):
                await state.begin()
        loaded = self._service.thread.provider.loaded
        if job.prompt is None or loaded is None or loaded.key != job.model:
            raise busy("another model was loaded meanwhile: ask again")
        request = state.request
        written = partial(json_bytes, self._describe, request.body, job.prompt.tokens, loaded)
        content = await self._service.workers.read(written, request.nbytes)
        await send_json(content, send)


def listed_tokens(
    options: ServerOptions, body: Body, tokens: list[int], loaded: LoadedModel
) -> Object:
    """The tokens of a prompt, and how many it may have."""
    if isinstance(body, TokenizedText) and body.add_special_tokens is False:
        tokens = loaded.tokenizer.encode(body.prompt, add_special_tokens=False)
    texts = None
    if isinstance(body, TokenizedText | TokenizedChat) and body.return_token_strs:
        texts = loaded.tokenizer.convert_ids_to_tokens(tokens)
    most = options.max_prompt_tokens or loaded.context_length
    return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": texts}


def text_of_tokens(body: Body, tokens: list[int], loaded: LoadedModel) -> Object:
    """The text of tokens."""
    return {"prompt": loaded.tokenizer.decode(tokens)}


def token_count(body: Body, tokens: list[int], loaded: LoadedModel) -> Object:
    """How many tokens a prompt has, in Anthropic's form."""
    return {"input_tokens": len(tokens)}
