"""The answers of Anthropic's Messages: content blocks, whole and as events, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paged_kv.server.completions.interface import (
    AnswerItems,
    Answers,
    Call,
    Choice,
    ItemEnd,
    ItemStart,
    Object,
    Part,
    Reasoning,
    Text,
    Usage,
    of_items,
)
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.request_log import request_id

# The types of errors by their status; others have those of 400 and of 500.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# Clients want thoughts to be signed, and send the signature back; this server signs nothing.
SIGNATURE = "unsigned"

# The types of blocks, and their fields of the same names.
FIELDS: dict[type[Part], str] = {Reasoning: "thinking", Text: "text"}

# A prefix that is marked so stays cached for so long after its last use, as at Anthropic.
HOUR_S = 3600.0


def error_body(error: APIError) -> Object:
    """An error in Anthropic's form."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error.status, usual)
    details = {"error_code": error.code, "param": error.param}
    described = {"type": kind, "message": error.message, "details": details}
    return {"type": "error", "error": described, "request_id": request_id()}


class MessageAnswers(Answers):
    """Writes one message.

    Args:
        name: identifies the request.
        model: the name in the request.
        shows_thinking: whether the client gets the thoughts.
    """

    def __init__(self, name: str, model: str, *, shows_thinking: bool) -> None:
        self._name = name
        self._model = model
        self._shows_thinking = shows_thinking
        self._answer = AnswerItems()
        # Of a stream: the number of the open block, and how the message ends.
        self._index = -1
        self._stop: Object = {}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        (choice,) = choices
        content: list[Object] = []
        for change in self._changes(choice):
            if isinstance(change, ItemStart):
                content.append(_empty_block(change.first))
            elif isinstance(change, ItemEnd):
                content[-1] |= _signed(change.kind)
            elif isinstance(change, Call):
                content[-1]["input"] = json.loads(change.arguments)
            else:
                content[-1][FIELDS[type(change)]] += change.text
        return self._message(content, usage) | self._stopped(choice)

    def on_start(self, usage: Usage) -> list[Object]:
        return [{"type": "message_start", "message": self._message([], usage)}]

    def on_delta(self, new: Choice) -> list[Object]:
        events = [event for change in self._changes(new) for event in self._events(change)]
        if new.finish_reason is not None:
            self._stop = self._stopped(new)
        return events

    def on_end(self, usage: Usage) -> list[Object]:
        changed = {"type": "message_delta", "delta": self._stop, "usage": self._usage(usage)}
        return [changed, {"type": "message_stop"}]

    def on_error(self, error: APIError) -> list[Object]:
        return [error_body(error)]

    def sent_back(self, answer: Choice) -> Choice:
        items = of_items(answer)
        return items if self._shows_thinking else replace(items, reasoning="")

    def heartbeat(self) -> list[Object]:
        return [{"type": "ping"}]

    def _message(self, content: list[Object], usage: Usage) -> Object:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Object:
        """Anthropic's counts: the first three add up to the prompt. All that was computed is
        cached, and counts as such where the request marks something to cache."""
        computed = usage.prompt_tokens - usage.cached_tokens
        created = computed if usage.held else 0
        ends = [each.num_tokens for each in usage.held if each.seconds == HOUR_S]
        for_an_hour = max(0, max(ends, default=0) - usage.cached_tokens)
        return {
            "input_tokens": computed - created,
            "cache_creation_input_tokens": created,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created - for_an_hour,
                "ephemeral_1h_input_tokens": for_an_hour,
            },
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            **usage.limit,
        }

    def _changes(self, new: Choice) -> Iterator[ItemStart | Part | ItemEnd]:
        for change in self._answer.take(new):
            if self._shows_thinking or not isinstance(change, Reasoning):
                yield change

    def _events(self, change: ItemStart | Part | ItemEnd) -> Iterator[Object]:
        match change:
            case ItemStart(first):
                self._index += 1
                yield self._event("content_block_start", content_block=_empty_block(first))
            case ItemEnd(kind):
                if signed := _signed(kind):
                    delta = {"type": "signature_delta", **signed}
                    yield self._event("content_block_delta", delta=delta)
                yield self._event("content_block_stop")
            case _:
                yield self._event("content_block_delta", delta=_delta(change))

    def _stopped(self, last: Choice) -> Object:
        if last.stop_text is not None and last.finish_reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_text}
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(last.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _event(self, kind: str, **more: Any) -> Object:
        return {"type": kind, "index": self._index, **more}


def _empty_block(first: Part) -> Object:
    match first:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Text():
            return {"type": "text", "text": ""}
        case Call(call_id, name):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}


def _signed(kind: type[Part]) -> Object:
    return {"signature": SIGNATURE} if kind is Reasoning else {}


def _delta(part: Part) -> Object:
    if isinstance(part, Call):
        return {"type": "input_json_delta", "partial_json": part.arguments}
    name = FIELDS[type(part)]
    return {"type": f"{name}_delta", name: part.text}
