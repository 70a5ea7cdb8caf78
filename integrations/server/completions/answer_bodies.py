"""Makes the bodies of responses in OpenAI's form, whole and as the events of a stream."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx_lm.server import get_system_fingerprint

from paged_kv.integrations.server.generation.jobs import Token

# OpenAI's log probability of an impossible token: JSON has no infinity.
LEAST_LOGPROB = -9999.0


@dataclass
class Usage:
    """The token counts of a request. `accepted_tokens` of the `draft_tokens` were accepted."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_tokens: int = 0
    draft_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": self._drafts} if self.draft_tokens else {}),
        }

    @property
    def _drafts(self) -> dict[str, int]:
        """Drafted tokens, as OpenAI counts those of predicted outputs."""
        return {
            "accepted_prediction_tokens": self.accepted_tokens,
            "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
        }


@dataclass
class Choice:
    """One choice, as far as it is generated.

    Attributes:
        index: its number.
        tokens: those not sent yet, with log probabilities, if the request asked for these.
        count: the number of all its tokens.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    count: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing yet, tokens aside."""
        return not (self.text or self.reasoning or self.tool_calls or self.finish_reason)

    def add(self, new: Choice) -> None:
        """Append a part that was generated since."""
        self.text += new.text
        self.reasoning += new.reasoning
        self.tool_calls += new.tool_calls
        self.tokens += new.tokens
        self.finish_reason = new.finish_reason


class Answers:
    """Makes the bodies of the responses to one request.

    Args:
        request_id: identifies the request.
        model: the name in the request.
        tokenizer: gives the texts of tokens.
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
        # Texts of tokens: log probabilities name the same ones again and again.
        self._text_of = functools.cache(partial(_text_of, tokenizer))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The response to a request without `stream`."""
        described = [self._described(choice, is_chunk=False) for choice in choices]
        return self._body(self.object_name, described) | {"usage": usage.as_dict()}

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """A chunk of a stream with one choice's new part."""
        return self._body(self.chunk_name, [self._described(choice, is_chunk=True)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`."""
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
        """Log probabilities of each token, in the form of chat completions."""
        return {"content": [self._logprob(token) for token in choice.tokens]}

    def _logprob(self, token: Token) -> dict[str, Any]:
        top = [self._token(each.token, each.logprob) for each in token.top]
        return {**self._token(token.token, token.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        # The tokenizer does not give the bytes of a token that is a part of a character.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"id": token, "token": text, "bytes": octets, "logprob": bounded(logprob)}


class ChatAnswers(Answers):
    """Response bodies of /v1/chat/completions."""

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
    """Response bodies of /v1/completions.

    Args:
        is_listed: whether to list log probabilities in OpenAI's form for this path; else in the
            form of chat completions, as mlx-lm does.
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


def _text_of(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token])
    return text


def bounded(logprob: float | None) -> float | None:
    """A log probability that JSON can hold, at least LEAST_LOGPROB."""
    if logprob is None:
        return None
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
