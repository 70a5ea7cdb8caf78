"""Turns a body of Messages into one of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paged_kv.server.completions.interface import Mark
from paged_kv.server.completions.tool_images import shown_by_user
from paged_kv.server.messages.requests import (
    SHARED,
    CacheControl,
    MessagesBody,
    OutputConfig,
    PromptBody,
    Thinking,
    ToolChoice,
)

Object = dict[str, Any]

# How long a marked prefix stays cached after its last use, as at Anthropic.
MINUTES_S = 300.0
HOUR_S = 3600.0


def chat_of(fields: Mapping[str, Any], body: PromptBody, skipped: Sequence[str]) -> Object:
    """The body of chat completions that asks for the same.

    Args:
        fields: the body as it came, for the fields that both have.
        body: the same, checked.
        skipped: lines that begin with one of these are left out at the start of system blocks.
    """
    chat = {name: fields[name] for name in SHARED if name in fields}
    chat["messages"] = _chat_messages(body.system, body.messages, skipped)
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat |= _tool_choice(body.tool_choice)
    given = fields.get("chat_template_kwargs")
    # Another value is refused with the other fields of chat completions.
    if given is None or isinstance(given, dict):
        chat["chat_template_kwargs"] = _template_variables(body.thinking, body.output_config) | (
            given or {}
        )
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        named = {"name": "output", "schema": schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    if isinstance(body, MessagesBody):
        chat["stop"] = body.stop_sequences
    return chat


def cache_marks(body: PromptBody, skipped: Sequence[str]) -> list[Mark]:
    """What is to stay cached of a body with marks: the whole prompt for 5 minutes, and for an hour
    all up to the last message with a mark that says so. The arguments are those of `chat_of`."""
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
    system = body.system if isinstance(body.system, list) else ()
    first: list[Any] = [*(body.tools or ()), *system]
    contents = [message["content"] for message in body.messages]
    by_message = [first, *(each if isinstance(each, list) else [] for each in contents)]
    for number, blocks in enumerate(by_message):
        nested = [each for block in blocks for each in _blocks_in(block)]
        marks = [each.get("cache_control") for each in (*nested, *blocks)]
        yield from ((number, mark) for mark in marks if mark is not None)
    if body.cache_control is not None:
        yield len(body.messages), body.cache_control


def _blocks_in(block: Any) -> list[Any]:
    content = block.get("content")
    return content if isinstance(content, list) else []


def _chat_messages(system: Any, messages: Iterable[Any], skipped: Sequence[str]) -> list[Object]:
    return shown_by_user([*_system(system, skipped), *_messages(messages)])


def _system(system: Any, skipped: Sequence[str]) -> list[Object]:
    texts = [system] if isinstance(system, str) else _texts(system or ())
    text = "".join(_without_lines(text, skipped) for text in texts)
    return [{"role": "system", "content": text}] if text else []


def _without_lines(text: str, skipped: Sequence[str]) -> str:
    while text and text.startswith(tuple(skipped)):
        text = text.partition("\n")[2]
    return text


def _messages(messages: Iterable[Any]) -> list[Object]:
    chat: list[Object] = []
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
    return chat


def _add_user(chat: list[Object], content: Any) -> None:
    """Add a message of the user, and before or after it the results of calls. Messages of the user
    in a row are one, as at Anthropic."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in blocks:
        if block["type"] == "tool_result":
            chat.append(_tool_result(block))
        elif chat and chat[-1]["role"] == "user":
            chat[-1]["content"].append(_part(block))
        else:
            chat.append({"role": "user", "content": [_part(block)]})


def _part(block: Any) -> Object:
    """A text or an image, as a part of a chat message."""
    if block["type"] != "image":
        return {"type": "text", "text": _shown_text(block)}
    source = block["source"]
    if source["type"] == "url":
        return {"type": "image_url", "image_url": {"url": source["url"]}}
    url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


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


def _tool_result(block: Any) -> Object:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = [_part(each) for each in content]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _assistant(content: Any) -> Object:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    message: Object = {"role": "assistant", "content": "".join(_texts(blocks))}
    thinking = "".join(each["thinking"] for each in blocks if each["type"] == "thinking")
    if thinking:
        # The names that chat templates read.
        message |= {"reasoning_content": thinking, "reasoning": thinking}
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = calls
    return message


def _call(block: Any) -> Object:
    function = {"name": block["name"], "arguments": block["input"]}
    return {"type": "function", "id": block["id"], "function": function}


def _texts(blocks: Iterable[Any]) -> list[str]:
    return [block["text"] for block in blocks if block["type"] == "text"]


def _tool(tool: Any) -> Object:
    fields = {**tool, "parameters": tool["input_schema"]}
    names = ("name", "description", "parameters", "strict")
    function = {name: fields[name] for name in names if fields.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Object:
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        chosen = {"type": "function", "function": {"name": choice.name}}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": chosen, **parallel}


def _template_variables(thinking: Thinking | None, output: OutputConfig | None) -> Object:
    """The variables of chat templates for thinking, by the names that models have for them."""
    variables: Object = {}
    if thinking is not None and thinking.type != "adaptive":
        variables["enable_thinking"] = thinking.type == "enabled"
    if output is not None and output.effort is not None:
        variables["reasoning_effort"] = output.effort
    return variables
