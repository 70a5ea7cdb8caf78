"""Reads Anthropic's Messages as requests for chats, on the same models and caches as OpenAI's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
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
from paged_kv.server.completions.interface import Answers, APIRequest, Mark, Object
from paged_kv.server.http.request_body import parse_body
from paged_kv.server.http.schema import DEFAULT_MODEL, ChatBody
from paged_kv.server.messages.answers import HOUR_S, MessageAnswers
from paged_kv.server.messages.requests import CacheControl, MessagesBody, PromptBody, ToolChoice
from paged_kv.server.options import ServerOptions

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"

# How long a marked prefix stays cached after its last use, unless its mark says `HOUR_S`.
MINUTES_S = 300.0

# Fields of chat completions that Anthropic has by other names.
NAMES = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


def read_messages(
    kind: type[PromptBody], options: ServerOptions, content: bytes, key: str | None
) -> APIRequest:
    """What the bytes of a body ask for.

    Args:
        kind: the schema of bodies.
        options: of the server: lines that begin with one of `skip_system_lines` are left out at
            the start of system blocks.

    Raises:
        APIError: 400, something is wrong with it.
    """
    body = parse_body(content, kind)
    skipped = options.skip_system_lines
    chat = chat_of(body, skipped)
    return APIRequest(
        chat,
        len(content),
        partial(_answers, body, chat),
        NAMES,
        cache_marks(body, skipped),
        is_counted=not isinstance(body, MessagesBody),
    )


def _answers(body: PromptBody, chat: ChatBody, name: str, _: Any) -> Answers:
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    return MessageAnswers(name, chat.model or DEFAULT_MODEL, shows_thinking=shows_thinking)


def chat_of(body: PromptBody, skipped: Sequence[str]) -> ChatBody:
    """The chat that a body asks for.

    Raises:
        APIError: 400, it is too much, or nothing.
    """
    choice, output = body.tool_choice, body.output_config
    has_one_call = choice is not None and choice.disable_parallel_tool_use
    form = None if output is None else output.format
    return chat_request(
        body,
        messages=_chat_messages(body.system, body.messages, skipped),
        tools=[offered_tool({**tool, "parameters": tool["input_schema"]}) for tool in body.tools],
        tool_choice=None if choice is None else _tool_choice(choice),
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
    system = body.system if isinstance(body.system, list) else ()
    first: list[Any] = [*body.tools, *system]
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
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = [
            tool_call(each["id"], each["name"], each["input"]) for each in calls
        ]
    return message


def _texts(blocks: Iterable[Any]) -> list[str]:
    return [block["text"] for block in blocks if block["type"] == "text"]


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.name is not None:
        return only_tool(choice.name)
    return "required" if choice.type == "any" else choice.type


def _template_variables(body: PromptBody) -> Object:
    """The variables of chat templates for thinking, by the names that models have for them."""
    thinking, output = body.thinking, body.output_config
    variables: Object = {}
    if thinking is not None and thinking.type != "adaptive":
        variables["enable_thinking"] = thinking.type == "enabled"
    if output is not None and output.effort is not None:
        variables["reasoning_effort"] = output.effort
    return variables
