"""What the clients of a soak ask, over plain sockets, and what a calm server answers."""

import argparse
import asyncio
import base64
import inspect
import json
import socket
from dataclasses import dataclass
from http.client import HTTPResponse
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from tests.support.bad_requests import CHAT, TEXT, Bad, bad_requests
from tests.support.running_server import FEW_LIKELY

# Never the token that ends a text.
GO_ON = {"0": -1000}
# An answer that no soak is long enough for; log probabilities make each of its parts long.
ENDLESS = {"max_tokens": 1900, "logit_bias": GO_ON, "top_logprobs": 20, "stream": True}
TOOLS = [{"type": "function", "function": {"name": "walk", "parameters": {"type": "object"}}}]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "long": {"temperature": 0, "max_tokens": 72, "logit_bias": GO_ON},
    "seed": {"temperature": 1, "seed": 5, "max_tokens": 16, **FEW_LIKELY},
    "choices": {"temperature": 1, "seed": 8, "n": 3, "max_tokens": 12, **FEW_LIKELY},
    "stops": {"temperature": 0, "max_tokens": 32, "stop": ["self", "\n\n"]},
    "penalties": {"temperature": 0, "max_tokens": 12, "presence_penalty": 1.5, "logprobs": 3},
    "without drafts": {"temperature": 0, "max_tokens": 16, "num_draft_tokens": 0},
    "prompts": {"temperature": 0, "max_tokens": 8},
    "tools": {"temperature": 0, "max_tokens": 12, "tools": TOOLS},
}
# Where prompts begin in a source, and their characters: up to two pages of tokens. Three share
# their beginning.
PROMPTS = ((20000, 60), (20000, 400), (20000, 900), (21000, 1500))


@dataclass(frozen=True)
class Question:
    """A request whose answer does not depend on the others."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a client gets.

    Attributes:
        choices: text and finish reason of each.
        is_whole: whether a stream had its end, without an error.
    """

    status: int
    choices: tuple[tuple[str, str | None], ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_whole: bool = True


def questions(pictures: dict[str, str]) -> list[Question]:
    """All kinds about all prompts; the pictures are data URLs, for a model that sees."""
    source = inspect.getsource(argparse)
    texts = [source[start : start + length] for start, length in PROMPTS]
    found = []
    for kind, body in KINDS.items():
        for text in texts:
            if kind == "tools":
                said = {"messages": [{"role": "user", "content": text}]}
                found.append(Question(kind, CHAT, body | said))
            else:
                prompt = [text, text[:40]] if kind == "prompts" else text
                found.append(Question(kind, TEXT, {"prompt": prompt} | body))
    for url in pictures.values():
        image = {"type": "image_url", "image_url": {"url": url}}
        parts = [image, {"type": "text", "text": texts[0]}]
        seen = {"messages": [{"role": "user", "content": parts}]}
        found.append(Question("images", CHAT, KINDS["greedy"] | seen))
    return found


def wrong_requests() -> list[Bad]:
    """Those that no model takes."""
    groups = bad_requests()
    return [bad for name in ("floats", "strings", "JSON", "names") for bad in groups[name]]


def request(path: str, content: bytes) -> bytes:
    """The bytes of a request after which the server closes the connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content


def asked(question: Question, **more: Any) -> bytes:
    """The bytes of a question's request, with further fields."""
    return request(question.path, json.dumps(question.body | more).encode())


async def answer(port: int, said: bytes, *, half_closes: bool = False, parts: int = 1) -> Answer:
    """Ask, the request in so many parts, and read the answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        step = -(-len(said) // parts)
        for start in range(0, len(said), step):
            writer.write(said[start : start + step])
            await writer.drain()
            # So that the server gets parts, if it is quick enough.
            await asyncio.sleep(0.05 if parts > 1 else 0)
        if half_closes:
            writer.write_eof()
        return parsed(await reader.read())
    finally:
        writer.close()


def parsed(received: bytes) -> Answer:
    """The answer in what came over a connection; http.client leaves out interim ones."""
    with HTTPResponse(cast(socket.socket, _Received(received))) as response:
        response.begin()
        status, content = response.status, response.read()
        if "event-stream" in (response.getheader("Content-Type") or ""):
            return _of_stream(content)
    said = json.loads(content)
    if status != 200:
        return Answer(status)
    choices = [_part(choice) for choice in said["choices"]]
    return Answer(200, tuple(choices), *_tokens(said["usage"]))


class _Received:
    """Stands for a socket from which all bytes have come."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, _: str) -> BytesIO:
        return BytesIO(self._received)


def _of_stream(content: bytes) -> Answer:
    lines = content.split(b"\n")[:-1]  # the last one was cut, if its server was killed
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    is_whole = events[-1:] == [b"[DONE]"]
    texts: dict[int, tuple[str, str | None]] = {}
    tokens = (0, 0)
    for event in events[: -1 if is_whole else None]:
        said = json.loads(event)
        if "error" in said:
            return Answer(200, is_whole=False)
        for choice in said["choices"]:
            text, reason = _part(choice)
            texts[choice["index"]] = (texts.get(choice["index"], ("", None))[0] + text, reason)
        if said.get("usage"):
            tokens = _tokens(said["usage"])
    return Answer(200, tuple(texts[index] for index in sorted(texts)), *tokens, is_whole)


def _part(choice: dict[str, Any]) -> tuple[str, str | None]:
    """The text, or the new part of it, and the finish reason of a choice."""
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or "", choice["finish_reason"]


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


async def calm_answers(port: int, asked_of: list[Question]) -> list[Answer]:
    """The answers of a server that has nothing else to do."""
    found = [await answer(port, asked(question)) for question in asked_of]
    assert all(each.status == 200 and each.choices for each in found)
    return found


def data_url(picture: Path) -> str:
    """A picture as requests hold it."""
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
