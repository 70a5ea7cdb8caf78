"""The chats that requests of other interfaces become, with messages and tools as chat templates
read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paged_kv.server.completions.interface import Object
from paged_kv.server.http.api_errors import wrong_value
from paged_kv.server.http.schema import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    ChatBody,
    NamedFunction,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    SharedFields,
)


def chat_request(body: SharedFields, **own: Any) -> ChatBody:
    """What a checked body of another interface asks for, in the fields of chat completions.

    Args:
        body: its fields of the same names mean the same, unless they are in `own`.
        own: the fields that this interface has in another form.

    Raises:
        APIError: 400, no message is left, or what one item has become is too much.
    """
    names = ChatBody.model_fields.keys() & type(body).model_fields.keys()
    chat = ChatBody.model_construct(**{name: getattr(body, name) for name in names} | own)
    if not chat.messages:
        raise wrong_value("messages: at least one with a content is needed", "messages")
    _require_at_most(MOST_MESSAGES, chat.messages, "messages")
    _require_at_most(MOST_TOOLS, chat.tools, "tools")
    for message in chat.messages:
        _require_at_most(MOST_PARTS, message.get("content"), "messages")
        _require_at_most(MOST_TOOLS, message.get("tool_calls"), "messages")
    return chat


def _require_at_most(most: int, value: Any, field: str) -> None:
    if isinstance(value, list) and len(value) > most:
        raise wrong_value(
            f"{field}: {len(value):,} items come together, and at most {most:,} are possible", field
        )


def text_part(text: str) -> Object:
    """A text in a message."""
    return {"type": "text", "text": text}


def image_part(url: str) -> Object:
    """An image in a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def thoughts(text: str) -> Object:
    """The thoughts of an answer, by the names that chat templates read."""
    return {"reasoning_content": text, "reasoning": text}


def tool_call(call_id: str, name: str, arguments: Any) -> Object:
    """A call in an answer."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str, content: Any) -> Object:
    """What a call gave."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def offered_tool(tool: Mapping[str, Any]) -> Object:
    """A tool by the fields of its function, some of which may be missing or null."""
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def only_tool(name: str) -> NamedTool:
    """The choice of the one tool that an answer must call."""
    function = NamedFunction.model_construct(name=name)
    return NamedTool.model_construct(type="function", function=function)


def fitting(schema: Mapping[str, Any]) -> ResponseFormat:
    """The form of an answer that fits a JSON schema."""
    named = NamedSchema.model_construct(json_schema=schema)
    return ResponseFormat.model_construct(type="json_schema", json_schema=named)


def shown_by_user(messages: Iterable[Object]) -> list[Object]:
    """Chat messages whose images are all the user's: those of a run of tools' results come behind
    it, before what the user says then."""
    shown: list[Object] = []
    images: list[Object] = []
    for message in messages:
        if message["role"] != "tool":
            message, images = _with_first(shown, images, message), []
        elif isinstance(message["content"], list):
            parts = message["content"]
            images += [part for part in parts if part["type"] == "image_url"]
            message = {**message, "content": [part for part in parts if part not in images]}
        shown.append(message)
    if images:
        shown.append({"role": "user", "content": images})
    return shown


def _with_first(shown: list[Object], images: list[Object], message: Object) -> Object:
    """A message behind some images: its own if it is the user's, or else those of one before."""
    if not images:
        return message
    if message["role"] != "user":
        shown.append({"role": "user", "content": images})
        return message
    content = message["content"]
    parts = [text_part(content)] if isinstance(content, str) else content
    return {**message, "content": [*images, *parts]}
