"""Reads Anthropic's Messages as requests for chats, on the same models and caches as OpenAI's, and
writes their answers: content blocks, whole and as events, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from paged_kv.server.completions.chat_messages import (
    chat_request,
    fitting,
    image_part,
    offered_tool,
    only_tool,
    shown_by_user,
    text_part,
    thoughts,
    tool_call,
    tool_result,
)
from paged_kv.server.completions.interface import (
    AnswerItems,
    Answers,
    APIRequest,
    Call,
    Choice,
    ItemEnd,
    ItemStart,
    Mark,
    Object,
    Part,
    Reasoning,
    Text,
    Usage,
    of_items,
)
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.request_body import parse_body
from paged_kv.server.http.request_log import request_id
from paged_kv.server.http.schema import DEFAULT_MODEL, ChatBody
from paged_kv.server.messages.requests import CacheControl, MessagesBody, PromptBody
from paged_kv.server.options import ServerOptions

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"

# How long a marked prefix stays cached after its last use, as at Anthropic; an hour if it says so.
MINUTES_S, HOUR_S = 300.0, 3600.0

# Fields of chat completions that Anthropic has by other names.
NAMES = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


def read_messages(
    kind: type[PromptBody], options: ServerOptions, content: bytes, key: str | None
) -> APIRequest:
    """A body of this schema. Lines that begin with one of the server's `skip_system_lines` are left
    out at the start of system blocks. Raises APIError 400: something is wrong with it."""
    body, skipped = parse_body(content, kind), options.skip_system_lines
    chat = chat_of(body, skipped)
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"

    def answers(name: str, _: Any) -> Answers:
        return MessageAnswers(name, chat.model or DEFAULT_MODEL, shows_thinking=shows_thinking)

    marks, is_counted = cache_marks(body, skipped), not isinstance(body, MessagesBody)
    return APIRequest(chat, len(content), answers, NAMES, marks, is_counted)


def chat_of(body: PromptBody, skipped: Sequence[str]) -> ChatBody:
    """The chat that a body asks for. Raises APIError 400: it is too much, or nothing."""
    choice, output = body.tool_choice, body.output_config
    has_one_call = choice is not None and choice.disable_parallel_tool_use
    chosen: Any = None
    if choice is not None and choice.name is not None:
        chosen = only_tool(choice.name)
    elif choice is not None:
        chosen = "required" if choice.type == "any" else choice.type
    form = None if output is None else output.format
    return chat_request(
        body,
        messages=_chat_messages(body.system, body.messages, skipped),
        tools=[offered_tool({**tool, "parameters": tool["input_schema"]}) for tool in body.tools],
        tool_choice=chosen,
        parallel_tool_calls=False if has_one_call else None,
        chat_template_kwargs=_template_variables(body) | (body.chat_template_kwargs or {}),
        response_format=None if form is None else fitting(form.schema_),
        stop=body.stop_sequences if isinstance(body, MessagesBody) else None,
    )


def cache_marks(body: PromptBody, skipped: Sequence[str]) -> list[Mark]:
    """What is to stay cached of a body with marks: the whole prompt for 5 minutes, and for an hour
    all up to the last message with a mark that says so."""
    marks = list(_marks(body))
    if not marks:
        return []
    ends = [(len(body.messages), MINUTES_S)]
    ends += [(number, HOUR_S) for number, mark in marks if mark.get("ttl") == "1h"][-1:]
    counts = [len(_chat_messages(body.system, body.messages[:at], skipped)) for at, _ in ends]
    # No template has a prompt without a message; the marks of tools are at the first one's end.
    return [Mark(max(1, count), life) for count, (_, life) in zip(counts, ends, strict=True)]


def _marks(body: PromptBody) -> Iterator[tuple[int, CacheControl]]:
    """The marks of a body in their order, each with the number of messages up to it."""

    def blocks_in(content: Any) -> list[Any]:
        return content if isinstance(content, list) else []

    first: list[Any] = [*body.tools, *blocks_in(body.system)]
    by_message = [first, *(blocks_in(message["content"]) for message in body.messages)]
    for number, blocks in enumerate(by_message):
        nested = [each for block in blocks for each in blocks_in(block.get("content"))]
        marks = [each.get("cache_control") for each in (*nested, *blocks)]
        yield from ((number, mark) for mark in marks if mark is not None)
    if body.cache_control is not None:
        yield len(body.messages), body.cache_control


def _chat_messages(system: Any, messages: Iterable[Any], skipped: Sequence[str]) -> list[Object]:
    chat: list[Object] = []
    texts = [system] if isinstance(system, str) else _texts(system or ())
    if text := "".join(_without_lines(each, skipped) for each in texts):
        chat.append({"role": "system", "content": text})
    for message in messages:
        content = message["content"]
        match message["role"]:
            case "user":
                _add_user(chat, content)
            case "assistant":
                chat.append(_assistant(content))
            case "system":
                text = content if isinstance(content, str) else "".join(_texts(content))
                chat.append({"role": "system", "content": text})
    return shown_by_user(chat)


def _without_lines(text: str, skipped: Sequence[str]) -> str:
    while text and text.startswith(tuple(skipped)):
        text = text.partition("\n")[2]
    return text


def _add_user(chat: list[Object], content: Any) -> None:
    """Add a message of the user, and before or after it the results of calls. Messages of the user
    in a row are one, as at Anthropic."""
    blocks = [text_part(content)] if isinstance(content, str) else content
    for block in blocks:
        if block["type"] == "tool_result":
            result = block.get("content") or ""
            parts = result if isinstance(result, str) else [_part(each) for each in result]
            chat.append(tool_result(block["tool_use_id"], parts))
        elif chat and chat[-1]["role"] == "user":
            chat[-1]["content"].append(_part(block))
        else:
            chat.append({"role": "user", "content": [_part(block)]})


def _part(block: Any) -> Object:
    if block["type"] != "image":
        return text_part(_shown_text(block))
    source = block["source"]
    if source["type"] == "url":
        return image_part(source["url"])
    return image_part(f"data:{source['media_type']};base64,{source['data']}")


def _shown_text(block: Any) -> str:
    """A text; of a document or a search result with what tells where it is from."""
    source = block.get("source")
    match block["type"]:
        case "text":
            return str(block["text"])
        case "search_result":
            about = [block["title"], source]
            content = block["content"]
        case _:
            about = [block[name] for name in ("title", "context") if name in block]
            content = source["data"] if source["type"] == "text" else source["content"]
    text = content if isinstance(content, str) else "".join(_texts(content))
    # Blocks follow each other without anything between them.
    return "".join(f"{each}\n" for each in (*about, text))


def _assistant(content: Any) -> Object:
    blocks = [text_part(content)] if isinstance(content, str) else content
    message: Object = {"role": "assistant", "content": "".join(_texts(blocks))}
    thinking = "".join(each["thinking"] for each in blocks if each["type"] == "thinking")
    if thinking:
        message |= thoughts(thinking)
    used = [block for block in blocks if block["type"] == "tool_use"]
    if used:
        calls = [tool_call(each["id"], each["name"], each["input"]) for each in used]
        message["tool_calls"] = calls
    return message


def _texts(blocks: Iterable[Any]) -> list[str]:
    return [block["text"] for block in blocks if block["type"] == "text"]


def _template_variables(body: PromptBody) -> Object:
    """The variables of chat templates for thinking, by the names that models have for them."""
    thinking, output = body.thinking, body.output_config
    variables: Object = {}
    if thinking is not None and thinking.type != "adaptive":
        variables["enable_thinking"] = thinking.type == "enabled"
    if output is not None and output.effort is not None:
        variables["reasoning_effort"] = output.effort
    return variables


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


def error_body(error: APIError) -> Object:
    """An error in Anthropic's form."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error.status, usual)
    details = {"error_code": error.code, "param": error.param}
    described = {"type": kind, "message": error.message, "details": details}
    return {"type": "error", "error": described, "request_id": request_id()}


class MessageAnswers(Answers):
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
