"""OpenAI's completions and chat completions: bodies of requests, answers and events, and log
probabilities; of vLLM those of prompts, and the tokens of texts."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from mlx_lm.server import get_system_fingerprint
from pydantic import Field, StrictInt

from paged_kv.server.completions.interface import Answers, APIRequest, Call, Choice, Object, Usage
from paged_kv.server.engine.jobs import ScoredToken, Token
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.api_errors import wrong_value
from paged_kv.server.http.request_body import checked, parse_body, parsed_json
from paged_kv.server.http.schema import DEFAULT_MODEL, Body, BodyFields, ChatBody, Name, TextBody
from paged_kv.server.options import ServerOptions

# OpenAI's log probability of an impossible token: JSON has no infinity.
LEAST_LOGPROB = -9999.0


class Logprobs:
    """The descriptions of one answer's tokens, whose texts a tokenizer gives."""

    def __init__(self, tokenizer: Any) -> None:
        # Log probabilities name the same tokens again and again.
        self.text_of = functools.cache(lambda token: str(tokenizer.decode([token])))

    def of(self, token: Token) -> dict[str, Any]:
        """A generated token and the likeliest ones in its place."""
        top = [self._described(each.token, each.logprob) for each in token.top]
        return {**self._described(token.token, token.logprob), "top_logprobs": top}

    def _described(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.text_of(token)
        # The tokenizer does not give the bytes of a token that is a part of a character.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"id": token, "token": text, "bytes": octets, "logprob": bounded(logprob)}


def bounded(logprob: float | None) -> float | None:
    """A log probability that JSON can hold, at least LEAST_LOGPROB."""
    if logprob is None:
        return None
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


def read_completion(kind: type[Body], content: bytes, key: str | None) -> APIRequest:
    """A body of this schema. Raises APIError 400: something is wrong with it."""
    body = parse_body(content, kind)
    answers: Any = TextAnswers if isinstance(body, TextBody) else ChatAnswers
    return APIRequest(body, len(content), partial(answers, body))


class OpenAIAnswers(Answers):
    """What the answers of both have."""

    object_name = ""
    chunk_name = ""
    id_prefix = ""
    last = b"data: [DONE]\n\n"

    def __init__(self, body: Body, name: str, tokenizer: Any) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{name}",
            "system_fingerprint": get_system_fingerprint(),
            "model": body.model or DEFAULT_MODEL,
            "created": int(time.time()),
        }
        options = body.stream_options
        self._includes_usage = options is not None and bool(options.include_usage)
        self._of_tokens = Logprobs(tokenizer)
        self._prompt_count = body.prompt_logprobs or 0

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        described = [self._described(choice, is_chunk=False) for choice in choices]
        return self._body(self.object_name, described) | {"usage": usage.as_dict()}

    def on_delta(self, new: Choice) -> list[Object]:
        return [self._body(self.chunk_name, [self._described(new, is_chunk=True)])]

    def on_end(self, usage: Usage) -> list[Object]:
        if not self._includes_usage:
            return []
        return [self._body(self.chunk_name, []) | {"usage": usage.as_dict()}]

    def _body(self, name: str, choices: list[Object]) -> Object:
        return {**self._head, "object": name, "choices": choices}

    def _described(self, choice: Choice, *, is_chunk: bool) -> Object:
        return {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice) if choice.tokens else None,
            **self._content(choice, is_chunk=is_chunk),
        }

    def _content(self, choice: Choice, *, is_chunk: bool) -> Object:
        raise NotImplementedError

    def _of_prompt(self, choice: Choice) -> Object:
        """A prompt's log probabilities in vLLM's form: for each token but the first one, those of
        itself and of the likeliest ones, by their ids."""
        if choice.prompt is None:
            return {}

        def described(token: int, logprob: float | None, rank: int | None) -> Object:
            text = self._of_tokens.text_of(token)
            return {"logprob": bounded(logprob), "rank": rank, "decoded_token": text}

        def listed(each: ScoredToken) -> Object | None:
            if each.logprob is None:
                return None
            top = enumerate(each.top[: self._prompt_count], 1)
            likely = {str(it.token): described(it.token, it.logprob, rank) for rank, it in top}
            return {str(each.token): described(each.token, each.logprob, each.rank)} | likely

        return {"prompt_logprobs": list(map(listed, choice.prompt))}

    def _logprobs(self, choice: Choice) -> Object:
        """Log probabilities of each token, in the form of chat completions."""
        return {"content": [self._of_tokens.of(token) for token in choice.tokens]}


class ChatAnswers(OpenAIAnswers):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody, name: str, tokenizer: Any) -> None:
        super().__init__(body, name, tokenizer)
        fields = ("reasoning", "reasoning_content")
        self._has_thoughts = any(each.get(name) for each in body.messages for name in fields)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        return super().whole(choices, usage) | self._of_prompt(choices[0])

    def sent_back(self, answer: Choice) -> Choice:
        # Few clients send thoughts back, and those that do have done so before.
        return answer if self._has_thoughts else replace(answer, reasoning="")

    def _content(self, choice: Choice, *, is_chunk: bool) -> Object:
        message: Object = {"role": "assistant"}
        if choice.text or not is_chunk:
            message["content"] = choice.text or None
        if choice.reasoning:
            message["reasoning"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [_described_call(call, is_chunk) for call in choice.calls]
        return {"delta" if is_chunk else "message": message}


def _described_call(call: Call, is_chunk: bool) -> Object:
    number = {"index": call.index} if is_chunk else {}
    if not call.call_id:
        return {"function": {"arguments": call.arguments}, **number}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function, **number}


class TextAnswers(OpenAIAnswers):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: TextBody, name: str, tokenizer: Any) -> None:
        super().__init__(body, name, tokenizer)
        # With a number of alternatives in OpenAI's form for this path; else in the form of chat
        # completions, as mlx-lm does.
        self._is_listed = not isinstance(body.logprobs, bool) and body.logprobs is not None
        self._offsets: dict[int, int] = {}

    def _content(self, choice: Choice, *, is_chunk: bool) -> Object:
        return {"text": choice.text, **self._of_prompt(choice)}

    def _logprobs(self, choice: Choice) -> Object:
        if not self._is_listed:
            return super()._logprobs(choice)
        text_of = self._of_tokens.text_of

        def top(token: Token) -> dict[str, float | None] | None:
            if token.logprob is None:  # nothing comes before the first of a prompt
                return None
            return {text_of(each.token): bounded(each.logprob) for each in token.top}

        texts = [text_of(token.token) for token in choice.tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(choice.index, 0))
            self._offsets[choice.index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [bounded(token.logprob) for token in choice.tokens],
            "top_logprobs": list(map(top, choice.tokens)),
            "text_offset": offsets,
        }


# Tokens of prompts for clients, and texts of tokens, in the form that vLLM's clients know.
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


class TokenizedText(TextBody):
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizedChat(ChatBody):
    """A body of /tokenize with messages: their chat template adds the special tokens."""

    return_token_strs: bool | None = None


class DetokenizedBody(BodyFields):
    model: Name | None = None
    tokens: Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]


def read_tokenized(content: bytes, key: str | None) -> APIRequest:
    """A body of /tokenize. Raises APIError 400: something is wrong with it."""
    fields = parsed_json(content)
    if "messages" in fields:
        return APIRequest(checked(fields, TokenizedChat), len(content))
    body = checked(fields, TokenizedText)
    if not isinstance(body.prompt, str):
        raise wrong_value("prompt: a text is needed here", "prompt")
    return APIRequest(body, len(content))


def read_detokenized(content: bytes, key: str | None) -> APIRequest:
    """A body of /detokenize. Raises APIError 400: something is wrong with it."""
    body = parse_body(content, DetokenizedBody)
    prompt = TextBody.model_construct(model=body.model, prompt=body.tokens)
    return APIRequest(prompt, len(content), names={"prompt": "tokens"})


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
    return {"prompt": loaded.tokenizer.decode(tokens)}


def token_count(body: Body, tokens: list[int], loaded: LoadedModel) -> Object:
    """How many tokens a prompt has, in Anthropic's form."""
    return {"input_tokens": len(tokens)}
