"""The answers of OpenAI's Responses: response objects of output items, whole and as events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from paged_kv.server.completions.answer_bodies import Logprobs
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
from paged_kv.server.responses.requests import OfferedTool, input_of

# What a reasoning item's `encrypted_content` begins with here. It is not encrypted: it lets clients
# that keep the conversation themselves send the model's thoughts back.
PLAIN = "plain:"

# What the ids of items begin with, as at OpenAI.
ID_PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class ResponseAnswers(Answers):
    """Writes one response.

    Args:
        name: ends the id of the response, and is in those of its items.
        fields: of the request, which the response repeats.
        tools: of the request, by the names of their functions.
        is_plain: whether reasoning items have their text as `encrypted_content` too.
        logprobs: describes the tokens of texts.
        keep: is called with the complete response.
    """

    def __init__(
        self,
        name: str,
        fields: Object,
        tools: Mapping[str, OfferedTool],
        *,
        is_plain: bool,
        logprobs: Logprobs,
        keep: Callable[[Object], None],
    ) -> None:
        self._name = name
        self._head = {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": int(time.time()),
            **fields,
        }
        self._tools = tools
        self._is_plain = is_plain
        self._keep = keep
        self._logprobs = logprobs
        self._answer = AnswerItems()
        # Those of texts that no event has named yet.
        self._tokens: list[Object] = []
        # The output so far. Of a stream, the last item may be open; if it is a call, with these
        # arguments.
        self._items: list[Object] = []
        self._arguments = ""
        self._is_cut = False
        self._sequence = -1

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        (choice,) = choices
        self.on_delta(choice)
        return self._complete(usage)

    def on_start(self, usage: Usage) -> list[Object]:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def on_delta(self, new: Choice) -> list[Object]:
        self._tokens += [self._logprobs.of(token) for token in new.tokens if token.is_text]
        self._is_cut = new.finish_reason == "length"
        events: list[Object] = []
        for change in self._answer.take(new):
            match change:
                case ItemStart(first):
                    events += self._begun(first)
                case ItemEnd(kind, reason):
                    events += self._ended(kind, is_cut=reason == "length")
                case _:
                    events += self._added(change)
        return events

    def on_end(self, usage: Usage) -> list[Object]:
        response = self._complete(usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def on_error(self, error: APIError) -> list[Object]:
        described = {"code": "server_error", "message": error.message}
        # Clients know only responses that have begun.
        begun = self.on_start(Usage()) if self._sequence < 0 else []
        response = self._response("failed") | {"error": described}
        return [*begun, self._event("response.failed", response=response)]

    def sent_back(self, answer: Choice) -> Choice:
        return of_items(answer)

    def _complete(self, usage: Usage) -> Object:
        """The response when nothing follows, which is kept."""
        response = self._response("incomplete" if self._is_cut else "completed")
        response["usage"] = _usage(usage)
        self._keep(response)
        return response

    def _response(self, status: str) -> Object:
        is_cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._items),
            "usage": None,
        }

    def _begun(self, part: Part) -> list[Object]:
        """The events that begin an item; it is open now."""
        item = self._empty_item(part)
        item_id = f"{ID_PREFIXES[item['type']]}_{self._name}_{len(self._items)}"
        item = {"id": item_id, **item, "status": "in_progress"}
        # Events are written at once, and items grow.
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=self._index, item={**item})
        if isinstance(part, Call):
            self._arguments = ""
            return [added]
        item["content"] = [_empty_content(part)]
        begun = self._content_event("response.content_part.added", part=_empty_content(part))
        return [added, begun]

    def _empty_item(self, part: Part) -> Object:
        match part:
            case Reasoning():
                return {"type": "reasoning", "summary": [], "content": []}
            case Text():
                return {"type": "message", "role": "assistant", "content": []}
            case Call(call_id, name):
                # Models also call functions that there are not: the client tells them.
                empty = {"type": "function_call", "name": name, "arguments": ""}
                if name in self._tools:
                    empty = self._tools[name].empty_call
                return {"call_id": call_id, **empty}

    def _added(self, part: Part) -> list[Object]:
        """The events of a part; the open item has it now."""
        item = self._items[-1]
        match part:
            case Reasoning(text):
                item["content"][0]["text"] += text
                return [self._content_event("response.reasoning_text.delta", delta=text)]
            case Text(text):
                tokens, self._tokens = self._tokens, []
                item["content"][0]["text"] += text
                item["content"][0]["logprobs"] += tokens
                more = {"delta": text, "logprobs": tokens}
                return [self._content_event("response.output_text.delta", **more)]
            case Call(_, _, arguments):
                self._arguments += arguments
                if item["type"] == "custom_tool_call":
                    return []  # the input is a text within them
                item["arguments"] = self._arguments
                kind = "response.function_call_arguments.delta"
                return [self._item_event(kind, delta=arguments)]

    def _ended(self, opened: type[Part], *, is_cut: bool) -> list[Object]:
        """The events that end the open item."""
        item = self._items[-1]
        is_whole = not is_cut
        if is_cut and opened is Call:
            with suppress(ValueError):
                json.loads(self._arguments)
                is_whole = True
        item["status"] = "completed" if is_whole else "incomplete"
        if opened is Reasoning and self._is_plain:
            item["encrypted_content"] = PLAIN + item["content"][0]["text"]
        if item["type"] == "custom_tool_call":
            item["input"] = input_of(self._arguments)
            kind = "response.custom_tool_call_input"
            done = [
                self._item_event(f"{kind}.delta", delta=item["input"]),
                self._item_event(f"{kind}.done", input=item["input"]),
            ]
        elif opened is Call:
            kind = "response.function_call_arguments.done"
            done = [self._item_event(kind, name=item["name"], arguments=item["arguments"])]
        else:
            (content,) = item["content"]
            named = ("text", "logprobs") if opened is Text else ("text",)
            done = [
                self._content_event(
                    f"response.{content['type']}.done", **{name: content[name] for name in named}
                ),
                self._content_event("response.content_part.done", part=content),
            ]
        return [
            *done,
            self._event("response.output_item.done", output_index=self._index, item=item),
        ]

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _content_event(self, kind: str, **more: Any) -> Object:
        return self._item_event(kind, content_index=0, **more)

    def _item_event(self, kind: str, **more: Any) -> Object:
        item_id = self._items[-1]["id"]
        return self._event(kind, item_id=item_id, output_index=self._index, **more)

    def _event(self, kind: str, **more: Any) -> Object:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **more}


def _empty_content(part: Reasoning | Text) -> Object:
    if isinstance(part, Reasoning):
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Object:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **usage.limit,
    }
