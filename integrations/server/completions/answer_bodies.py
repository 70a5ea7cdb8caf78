"""The bodies of answers, whole and in the events of a stream, in OpenAI's form."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.server import get_system_fingerprint

from paged_kv.integrations.server.generation.choice_text import Delta
from paged_kv.integrations.server.generation.jobs import Token

# What OpenAI tells of a token that is impossible: JSON has no infinity.
LEAST_LOGPROB = -9999.0


@dataclass
class Usage:
    """How much was computed for a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Choice:
    """One choice, as far as it is known.

    Attributes:
        index: its number.
        tokens: with their log probabilities, if these were asked; those that were not sent yet.
        count: of all its tokens.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    count: int = 0

    def add(self, delta: Delta) -> None:
        """Go on with what a token added."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.tool_calls += delta.tool_calls
        self.finish_reason = delta.finish_reason


class Answers:
    """Makes the bodies of the answers to one request.

    Args:
        request_id: tells it from others.
        model: as the request named it.
        tokenizer: names tokens.
    """

    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def __init__(self, request_id: str, model: str, tokenizer: Any) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{request_id}",
            "system_fingerprint": get_system_fingerprint(),
            "model": model,
            "created": int(time.time()),
        }
        self._tokenizer = tokenizer

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer to a request that is no stream."""
        described = [self._described(choice, is_chunk=False) for choice in choices]
        return self._body(self.object_name, described) | {"usage": usage.as_dict()}

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """What is new of one choice."""
        return self._body(self.chunk_name, [self._described(choice, is_chunk=True)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The end of a stream that includes what was used."""
        return self._body(self.chunk_name, []) | {"usage": usage.as_dict()}

    def _body(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": name, "choices": choices}

    def _described(self, choice: Choice, *, is_chunk: bool) -> dict[str, Any]:
        return {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice) if choice.tokens else None,
            **self._content(choice, is_chunk=is_chunk),
        }

    def _content(self, choice: Choice, *, is_chunk: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        """Of each token, as for conversations."""
        return {"content": [self._logprob(token) for token in choice.tokens]}

    def _logprob(self, token: Token) -> dict[str, Any]:
        top = [self._token(each.token, each.logprob) for each in token.top]
        return {**self._token(token.token, token.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        # Of a part of a character the tokenizer does not tell the bytes.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"id": token, "token": text, "bytes": octets, "logprob": bounded(logprob)}

    def _text_of(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


class ChatAnswers(Answers):
    """Of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def _content(self, choice: Choice, *, is_chunk: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if choice.text or not is_chunk:
            message["content"] = choice.text or None
        if choice.reasoning:
            message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        return {"delta" if is_chunk else "message": message}


class TextAnswers(Answers):
    """Of /v1/completions.

    Args:
        is_listed: whether log probabilities are listed as OpenAI lists them here; else as for
            conversations, as mlx-lm does.
    """

    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, request_id: str, model: str, tokenizer: Any, *, is_listed: bool) -> None:
        super().__init__(request_id, model, tokenizer)
        self._is_listed = is_listed
        self._offsets: dict[int, int] = {}

    def _content(self, choice: Choice, *, is_chunk: bool) -> dict[str, Any]:
        return {"text": choice.text}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        if not self._is_listed:
            return super()._logprobs(choice)
        texts = [self._text_of(token.token) for token in choice.tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(choice.index, 0))
            self._offsets[choice.index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [bounded(token.logprob) for token in choice.tokens],
            "top_logprobs": [
                {self._text_of(each.token): bounded(each.logprob) for each in token.top}
                for token in choice.tokens
            ],
            "text_offset": offsets,
        }


def bounded(logprob: float | None) -> float | None:
    """A log probability that JSON can tell."""
    if logprob is None:
        return None
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
