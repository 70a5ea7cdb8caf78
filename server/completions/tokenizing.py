"""Turns prompts into tokens and back for clients, in the form that vLLM's clients know."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt
from starlette.types import Send

from paged_kv.server.completions.answering import Answering, json_bytes, send_json
from paged_kv.server.completions.conversation import Conversation
from paged_kv.server.completions.interface import Answers, Interface, ReadRequest
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.api_errors import busy, wrong_value
from paged_kv.server.http.known_fields import require_known
from paged_kv.server.http.request_body import body_of, checked, parsed_json
from paged_kv.server.http.schema import Body, ChatBody, Name, TextBody

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


class TokenizedText(TextBody):
    """A body of /tokenize with a prompt."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizedChat(ChatBody):
    """A body of /tokenize with messages: their chat template adds the special tokens."""

    return_token_strs: bool | None = None


class DetokenizedBody(BaseModel):
    """A body of /detokenize."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Name | None = None
    tokens: Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]


class Tokenizing(Interface):
    """Reads what is to become tokens."""

    def read(self, content: bytes, key: str | None) -> ReadRequest:
        """See `Interface`."""
        fields = parsed_json(content)
        body: Body
        if "messages" in fields:
            body = body_of(fields, TokenizedChat)
        else:
            body = text = body_of(fields, TokenizedText)
            if not isinstance(text.prompt, str):
                raise wrong_value("prompt: a text is needed here", "prompt")
        return ReadRequest(body, _unanswered, len(content))


class Detokenizing(Interface):
    """Reads what is to become text."""

    fields: ClassVar = {"prompt": "tokens"}

    def read(self, content: bytes, key: str | None) -> ReadRequest:
        """See `Interface`."""
        fields = parsed_json(content)
        require_known(fields, DetokenizedBody.model_fields)
        body = checked(fields, DetokenizedBody)
        prompt = {"model": body.model, "prompt": body.tokens}
        return ReadRequest(body_of(prompt, TextBody), _unanswered, len(content))


class Tokens(Answering):
    """Answers with the tokens of a prompt, as its completion would have them."""

    async def _answer(self, conversation: Conversation, send: Send) -> None:
        request = conversation.plan.request
        job = await self._read_prompt(conversation)
        loaded = self._service.thread.provider.loaded
        if job.prompt is None or loaded is None or loaded.key != job.model:
            raise busy("another model was loaded meanwhile: ask again")
        described = partial(self._described, request.body, job.prompt.tokens, loaded)
        written = partial(json_bytes, described)
        content = await self._service.workers.read(written, request.nbytes)
        await send_json(content, send)

    def _described(self, body: Body, tokens: list[int], loaded: LoadedModel) -> dict[str, Any]:
        if isinstance(body, TokenizedText) and body.add_special_tokens is False:
            tokens = loaded.tokenizer.encode(body.prompt, add_special_tokens=False)
        texts = None
        if isinstance(body, TokenizedText | TokenizedChat) and body.return_token_strs:
            texts = loaded.tokenizer.convert_ids_to_tokens(tokens)
        most = self._service.options.max_prompt_tokens or loaded.context_length
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": texts}


class Text(Tokens):
    """Answers with the text of tokens."""

    def _described(self, body: Body, tokens: list[int], loaded: LoadedModel) -> dict[str, Any]:
        return {"prompt": loaded.tokenizer.decode(tokens)}


def _unanswered(name: str, tokenizer: Any) -> Answers:
    raise AssertionError("nothing is generated")
