"""Turns a body of Responses into one of chat completions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paged_kv.server.completions.tool_images import shown_by_user
from paged_kv.server.responses.requests import (
    SHARED,
    Format,
    ResponsesBody,
)
from paged_kv.server.responses.tools import OfferedTool, arguments_of, function_name

# What a reasoning item's `encrypted_content` begins with here. It is not encrypted: it lets clients
# that keep the conversation themselves send the model's thoughts back.
PLAIN = "plain:"

Object = dict[str, Any]


def chat_of(
    fields: Mapping[str, Any],
    body: ResponsesBody,
    items: Iterable[Any],
    tools: Collection[OfferedTool],
) -> Object:
    """The body of chat completions that asks for the same.

    Args:
        fields: the body as it came, for the fields that both have.
        body: the same, checked.
        items: those of the responses before and of this one, without references.
        tools: of the body.
    """
    chat = {name: fields[name] for name in SHARED if name in fields}
    chat["messages"] = messages_of(body.instructions, items)
    chat["max_tokens"] = body.max_output_tokens
    if body.includes_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if tools:
        chat["tools"] = [{"type": "function", "function": tool.function} for tool in tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    return chat


def messages_of(instructions: str | None, items: Iterable[Any]) -> list[Object]:
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
                thoughts = message.get("reasoning_content", "") + _thoughts(item)
                # The names that chat templates read.
                message |= {"reasoning_content": thoughts, "reasoning": thoughts}
            case "function_call" | "custom_tool_call":
                message = _open_answer(messages)
                message.setdefault("tool_calls", []).append(_call(item))
            case "function_call_output" | "custom_tool_call_output":
                messages.append(_call_output(item))
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
    """A text or an image, as a part of a chat message."""
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "text", "text": _text(part)}


def _text(part: Any) -> str:
    return str(part["refusal"] if "refusal" in part else part["text"])


def _thoughts(item: Any) -> str:
    if content := item.get("content"):
        return "".join(each["text"] for each in content)
    encrypted = item.get("encrypted_content") or ""
    return encrypted.removeprefix(PLAIN) if encrypted.startswith(PLAIN) else ""


def _call(item: Any) -> Object:
    function = {"name": function_name(item), "arguments": arguments_of(item)}
    return {"type": "function", "id": item["call_id"], "function": function}


def _call_output(item: Any) -> Object:
    output = item["output"]
    if not isinstance(output, str):
        output = [_part(each) for each in output]
    return {"role": "tool", "tool_call_id": item["call_id"], "content": output}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(text_format: Format) -> Object:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    named = text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": named}
