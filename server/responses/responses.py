"""Reads OpenAI's Responses as requests for chats, on the same models and caches as its
completions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from paged_kv.server.completions.answer_bodies import Logprobs
from paged_kv.server.completions.chat_messages import (
    chat_request,
    fitting,
    image_part,
    only_tool,
    shown_by_user,
    text_part,
    thoughts,
    tool_call,
    tool_result,
)
from paged_kv.server.completions.interface import Answers, APIRequest, Object, renaming
from paged_kv.server.http.access import salt_of
from paged_kv.server.http.api_errors import APIError, shortened, wrong_value
from paged_kv.server.http.request_body import parse_body
from paged_kv.server.http.schema import ChatBody, ResponseFormat
from paged_kv.server.responses.answers import PLAIN, ResponseAnswers
from paged_kv.server.responses.kept_responses import KeptResponses, Turn, named
from paged_kv.server.responses.requests import (
    ENCRYPTED,
    LOGPROBS,
    OfferedTool,
    ResponsesBody,
    TextConfig,
    arguments_of,
    function_name,
    offered_tools,
)

PATH = "/v1/responses"

# Fields of chat completions that this interface has by other names.
NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}


def read_responses(kept: KeptResponses, content: bytes, key: str | None) -> APIRequest:
    """What the bytes of a body ask for, for the client with this salt of its API key. Raises
    APIError 400: something is wrong with it, or it names what is not kept."""
    body = parse_body(content, ResponsesBody)
    owner = salt_of(key, body.cache_salt)
    previous = None
    if body.previous_response_id is not None:
        with _of_field("previous_response_id"):
            previous = kept.get(owner, body.previous_response_id)
    earlier = [] if previous is None else previous.all_items()
    items = named(_resolved(kept, owner, body), kept.new_name())
    items_bytes = len(json.dumps(items))
    earlier_bytes = 0 if previous is None else sum(turn.nbytes for turn in previous.turns())
    tools = offered_tools(body.tools)
    with renaming(NAMES):
        chat = chat_of(body, [*earlier, *items], tools.values())

    def keep(response: Object) -> None:
        if body.store is not False:
            nbytes = items_bytes + len(json.dumps(response))
            kept.keep(owner, Turn(previous, items, response, nbytes))

    def answers(_: str, tokenizer: Any) -> Answers:
        return ResponseAnswers(
            kept.new_name(),
            _repeated(body, chat),
            tools,
            is_plain=ENCRYPTED in (body.include or ()),
            logprobs=Logprobs(tokenizer),
            keep=keep,
        )

    # Kept items are read as well, and take as long as if the client had sent them.
    return APIRequest(chat, max(len(content), items_bytes) + earlier_bytes, answers, NAMES)


def _resolved(kept: KeptResponses, owner: Hashable, body: ResponsesBody) -> list[Any]:
    """The items of the input, with those that references name in their places. Raises APIError 400:
    an item is not kept, or is named twice: prompts would have no limit."""
    ids = [item["id"] for item in body.items if _is_reference(item)]
    for item_id, count in Counter(ids).items():
        if count > 1:
            raise wrong_value(f"input: item {shortened(item_id)} comes twice", "input")
    with _of_field("input"):
        known = kept.items(owner, ids)
    return [known[item["id"]] if _is_reference(item) else item for item in body.items]


def _is_reference(item: Any) -> bool:
    return "role" not in item and item.get("type") in (None, "item_reference")


@contextmanager
def _of_field(field: str) -> Iterator[None]:
    """Let errors be about a field."""
    try:
        yield
    except APIError as error:
        raise wrong_value(f"{field}: {error.message}", field) from error


def chat_of(body: ResponsesBody, items: Iterable[Any], tools: Iterable[OfferedTool]) -> ChatBody:
    """The chat that a body asks for with the items of the responses before and of this one, without
    references. Raises APIError 400: it is too much, or nothing."""
    choice, lists_tokens = body.tool_choice, LOGPROBS in (body.include or ())
    return chat_request(
        body,
        messages=_messages_of(body.instructions, items),
        max_tokens=body.max_output_tokens,
        logprobs=lists_tokens or None,
        top_logprobs=body.top_logprobs or 0 if lists_tokens else None,
        tools=[{"type": "function", "function": tool.function} for tool in tools],
        tool_choice=only_tool(choice["name"]) if isinstance(choice, dict) else choice,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=None if body.text is None else _response_format(body.text),
    )


def _response_format(text: TextConfig) -> ResponseFormat | None:
    if text.format is None:
        return None
    if text.format.schema_ is not None and text.format.type == "json_schema":
        return fitting(text.format.schema_)
    return ResponseFormat.model_construct(type=text.format.type)


def _repeated(body: ResponsesBody, chat: ChatBody) -> Object:
    """The fields of a request that its response repeats."""
    choice = body.tool_choice or "auto"
    text = None if body.text is None else body.text.model_dump(by_alias=True, exclude_unset=True)
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": chat.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": text or {"format": {"type": "text"}},
        "tool_choice": choice,
        "tools": body.tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _messages_of(instructions: str | None, items: Iterable[Any]) -> list[Object]:
    """The chat messages of items. One message has the thoughts, texts and calls of an answer."""
    messages: list[Object] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item.get("type", "message"):
            case "message":
                _add_message(messages, item)
            case "reasoning":
                message = _open_answer(messages)
                message |= thoughts(message.get("reasoning_content", "") + _thoughts(item))
            case "function_call" | "custom_tool_call":
                message = _open_answer(messages)
                call = tool_call(item["call_id"], function_name(item), arguments_of(item))
                message.setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                output = item["output"]
                parts = output if isinstance(output, str) else [_part(each) for each in output]
                messages.append(tool_result(item["call_id"], parts))
    return shown_by_user(messages)


def _add_message(messages: list[Object], item: Any) -> None:
    role, content = item["role"], item["content"]
    if role == "assistant":
        parts = [{"text": content}] if isinstance(content, str) else content
        message = _open_answer(messages)
        message["content"] += "".join(map(_text, parts))
        return
    if not isinstance(content, str):
        content = [_part(each) for each in content]
    # Few templates know developers; their messages count as much as the system's.
    messages.append({"role": "system" if role == "developer" else role, "content": content})


def _open_answer(messages: list[Object]) -> Object:
    """The assistant's message that later items belong to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _part(part: Any) -> Object:
    if part["type"] == "input_image":
        return image_part(part["image_url"])
    return text_part(_text(part))


def _text(part: Any) -> str:
    return str(part["refusal"] if "refusal" in part else part["text"])


def _thoughts(item: Any) -> str:
    if content := item.get("content"):
        return "".join(each["text"] for each in content)
    encrypted = item.get("encrypted_content") or ""
    return encrypted.removeprefix(PLAIN) if encrypted.startswith(PLAIN) else ""
