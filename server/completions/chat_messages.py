"""Chat messages: what requests of other interfaces become, what parts they may have, and the images
in them."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPException
from time import monotonic
from typing import Any
from urllib.request import urlopen

from mlx_lm import server

from paged_kv.server.completions.interface import Object
from paged_kv.server.http.api_errors import APIError, shortened, wrong_value
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

# More frames than most models take of a video. A processor makes megabytes of the smallest image.
MOST_IMAGES = 64

# For all images of a request that are given by URLs.
FETCH_S = 30.0

_KINDS = ("text", "image_url", "input_image", "image")


def chat_request(body: SharedFields, **own: Any) -> ChatBody:
    """What a checked body of another interface asks for, in the fields of chat completions. Its
    fields of the same names mean the same, unless they are in `own`. Raises APIError 400: no
    message is left, or what one item has become is too much."""
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
    return {"type": "text", "text": text}


def image_part(url: str) -> Object:
    return {"type": "image_url", "image_url": {"url": url}}


def thoughts(text: str) -> Object:
    """The thoughts of an answer, by the names that chat templates read."""
    return {"reasoning_content": text, "reasoning": text}


def tool_call(call_id: str, name: str, arguments: Any) -> Object:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str, content: Any) -> Object:
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
        content: Any = message.get("content")
        if message["role"] == "tool":
            if isinstance(content, list):
                images += [part for part in content if part["type"] == "image_url"]
                message = {**message, "content": [part for part in content if part not in images]}
        elif images and message["role"] == "user":
            parts = [text_part(content)] if isinstance(content, str) else content
            message, images = {**message, "content": [*images, *parts]}, []
        elif images:
            shown.append({"role": "user", "content": images})
            images = []
        shown.append(message)
    if images:
        shown.append({"role": "user", "content": images})
    return shown


def copied(messages: Sequence[Any]) -> list[Any]:
    """Messages to change, with the arguments of calls as objects: mlx-lm puts texts in the place of
    contents. All else is shared: a copy of millions of objects would take seconds."""
    copies = []
    for message in messages:
        copy = {**message}
        if isinstance(content := copy.get("content"), list):
            copy["content"] = [{**part} for part in content]
        if calls := copy.get("tool_calls"):
            copy["tool_calls"] = [_copied_call(call) for call in calls]
        copies.append(copy)
    return copies


def _copied_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> dict[str, Any]:
    """The arguments of a call. Those that are cut or no object stay readable as a text in one: a
    broken call must not end a conversation, and templates go through the names of arguments."""
    try:
        parsed = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        parsed = given
    return parsed if isinstance(parsed, dict) else {"arguments": given} if parsed else {}


def require_parts(
    messages: Sequence[Any], *, why_no_images: str | None, urls_allowed: bool
) -> None:
    """Check that each part is a text, or an image that this server may read. Raises APIError 400:
    one is neither, or there are too many images."""
    images = 0
    contents = [message.get("content") for message in messages]
    for part in (part for each in contents if isinstance(each, list) for part in each):
        kind = part.get("type")
        if kind not in _KINDS:
            raise _wrong(f"a part of a message is of type {kind!r}: send texts and images only")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise _wrong("a part of type 'text' has no string as its text")
            continue
        if why_no_images is not None:
            raise _wrong(why_no_images)
        images += 1
        if images > MOST_IMAGES:
            raise _wrong(f"at most {MOST_IMAGES} images are possible in one request")
        url = server._image_url(part)
        if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
            raise _wrong("an image must be given as a data URL")
        if not (url.startswith("data:") or urls_allowed):
            raise _wrong(
                "this server fetches no images: send a data URL, or start it with "
                "--allow-image-urls"
            )


def require_no_marks(messages: Sequence[Any], marks: Iterable[str]) -> None:
    """Check that no text of a message holds a mark that stands for an image. Raises APIError 400:
    one does."""
    for message in messages:
        content: Any = message.get("content")
        parts = content if isinstance(content, list) else []
        # A template may put texts together.
        joined = "".join(part["text"] for part in parts if part.get("type") == "text")
        texts = json.dumps(message, ensure_ascii=False) + joined
        for mark in marks:
            if mark in texts:
                raise typed_mark(mark, "messages")


def typed_mark(mark: str, param: str) -> APIError:
    """400: a text holds a mark that stands for an image."""
    return wrong_value(
        f"a text holds {mark!r}, which stands for images or sounds in prompts of this model: leave "
        "it out, and send images as parts of a message",
        param,
    )


def inline_image_urls(messages: Sequence[Any], most_bytes: int) -> None:
    """Fetch the images that are given by http URLs, and put data URLs in their place. Raises
    APIError 400: they cannot be fetched, are too long or take too long."""
    deadline = monotonic() + FETCH_S
    for part in server._image_parts(list(messages)):
        url = str(server._image_url(part))
        if url.startswith(("http://", "https://")):
            content = base64.b64encode(_fetched(url, most_bytes, deadline)).decode()
            part.clear()
            part.update(type="image_url", image_url={"url": f"data:;base64,{content}"})
            most_bytes -= len(content)


def image_files(messages: Sequence[Any]) -> list[bytes]:
    """The files in the data URLs of all image parts, in order. Raises APIError 400: one is not
    base64."""
    return [_decoded(str(server._image_url(part))) for part in server._image_parts(list(messages))]


def _fetched(url: str, most_bytes: int, deadline: float) -> bytes:
    content = bytearray()
    try:
        with urlopen(url, timeout=max(0.001, deadline - monotonic())) as response:
            while part := response.read1(1 << 16):
                content += part
                if len(content) > most_bytes:
                    raise _wrong("the images of a request have more bytes than --max-body-bytes")
                if monotonic() > deadline:
                    raise TimeoutError(f"all images of a request have {FETCH_S:g} s")
    except (OSError, ValueError, HTTPException) as error:
        raise _wrong(f"the image at {shortened(url)} cannot be fetched: {error}") from error
    return bytes(content)


def _decoded(url: str) -> bytes:
    head, _, content = url.partition(",")
    if not head.endswith(";base64"):
        raise _wrong("the data URL of an image must be base64: data:image/png;base64,...")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise _wrong(f"the data URL of an image is not base64: {error}") from error


def _wrong(message: str) -> APIError:
    return wrong_value(message, "messages")
