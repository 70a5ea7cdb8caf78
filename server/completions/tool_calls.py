"""Parses the tool calls in answers with mlx-lm's parsers, whose cost a client chooses.

Some take quadratic or cubic time. Of texts that are made for them, minicpm5's takes 0.04 s for
1,024 characters and 2 s for 4,096, and gemma4's minutes for 131,072. A thread parses short texts:
the parsers search with the package regex, which lets other threads run meanwhile. A process, which
the system ends in time, parses long ones. Streams read the arguments of some forms while the model
writes them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from paged_kv.server.completions import parse_tool_call
from paged_kv.server.completions.interface import Call
from paged_kv.server.completions.service import WorkerThreads, run_python
from paged_kv.server.engine.choice_text import Delta

log = logging.getLogger(__name__)

# A process takes a tenth of a second to start, in which a model writes a few of so many characters.
LONG_CALL_CHARACTERS = 1024
TIME_LIMIT_S = 10
# An error may quote the whole call.
MOST_LOGGED = 200

# Takes the text of a call and the request's tools; makes a call, or a list of calls.
Parser = Callable[[str, Any], Any]


async def parse_calls(workers: WorkerThreads, parser: Parser, tools: Any, text: str) -> Any:
    """What a parser, a function of a module of a package, makes of the text of one call or several
    with the tools of a request. Raises any Exception: it does not understand the text, or not in
    time."""
    if len(text) <= LONG_CALL_CHARACTERS:
        return await workers.write(partial(parser, text, tools), 0)

    def question() -> bytes:
        # As `json.dumps` would hold Python's lock, and tools can be megabytes.
        return "".join(json.JSONEncoder().iterencode([text, tools])).encode()

    async with workers.call_processes:
        asked = await workers.write(question, sys.maxsize)
        arguments = parser.__module__, parser.__qualname__, str(TIME_LIMIT_S)
        try:
            found = await run_python(parse_tool_call.__file__, *arguments, question=asked)
        except TimeoutError:
            raise TimeoutError(f"it took longer than {TIME_LIMIT_S} s") from None
    return json.loads(found)


# Longer beginnings are not searched again with every token.
MOST_HEAD_CHARACTERS = 1024

# What is before the arguments of a call, from the end of the call before it, in texts of mlx-lm's
# parsers.
_NAMED = re.compile(
    r'[\s\[\]},]*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
)
_HEADS: Mapping[str, Sequence[re.Pattern[str]]] = {
    "json_tools": (_NAMED,),
    "mistral": (_NAMED, re.compile(r"\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)")),
    "kimi_k2": (
        re.compile(
            r"(?:\s|<\|tool_call_(?:begin|end)\|>)*(?P<id>(?:functions\.)?(?P<name>[^\s<]+):\d+)"
            r"\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
    ),
}


# What was written of a call: its name, and its id if the model gives it one, or None if it began
# with another piece; and a piece of its arguments. These together are JSON, if the model writes it.
Piece = tuple[dict[str, Any] | None, str]


class OpenCall:
    """Reads a text of calls that grows, whose arguments are JSON behind one of the `heads`; without
    any it reads nothing. It `has_begun` if any piece was read, and `is_whole` if nothing but such
    pieces follows."""

    def __init__(self, heads: Sequence[re.Pattern[str]] = ()) -> None:
        self.has_begun = self.is_whole = False
        # The text before is read.
        self._at = 0
        self._heads = heads
        # Within the arguments: in how many objects and lists, and in which part of a text.
        self._depth = 0
        self._is_text = self._is_escaped = False

    def take(self, text: str) -> Iterator[Piece]:
        """The pieces that are new in a text, which begins with the one before."""
        while self._at < len(text):
            head = None
            if not self._depth:
                found = self._head(text)
                if found is None:
                    return
                self._at, head = found.end(), found.groupdict()
            self.has_begun = self.is_whole = True
            yield head, "".join(self._read(text))

    def rest(self, arguments: dict[str, Any]) -> str:
        """The last piece, by what the parser makes of the whole text."""
        return ""

    def _head(self, text: str) -> re.Match[str] | None:
        if len(text) - self._at > MOST_HEAD_CHARACTERS:
            return None
        found = (head.match(text, self._at) for head in self._heads)
        return next(filter(None, found), None)

    def _read(self, text: str) -> Iterator[str]:
        """The characters of the arguments, up to their end."""
        for char in text[self._at :]:
            self._at += 1
            # Models write line ends into texts, which JSON does not allow.
            yield json.dumps(char)[1:-1] if self._is_text and char < " " else char
            if self._is_text:
                self._is_text = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^\s<>]+)>")
# A line end before a value, and one behind it, do not belong to it.
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^\s<>]+)>(?:\n|(?=[^\n]))")
_END = "</parameter>"


class TaggedCall(OpenCall):
    """Reads a call of Qwen's coders, whose parameters have tags around them, up to the first
    parameter that is not a text: the parser knows how other values are to be read."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._tools = tools
        self._texts: set[str] = set()
        self._sent: set[str] = set()
        # Of the value that is open: what comes before it, until that is sent.
        self._is_open = False
        self._name = ""

    def take(self, text: str) -> Iterator[Piece]:
        if not self.has_begun:
            found = _FUNCTION.match(text)
            if found is None:
                return
            self.has_begun, self._at = True, found.end()
            self._texts = _texts_of(self._tools, found["name"])
            yield found.groupdict(), "{"
        if written := "".join(self._read(text)):
            yield None, written

    def rest(self, arguments: dict[str, Any]) -> str:
        if self._is_open:
            return ""
        left = {name: value for name, value in arguments.items() if name not in self._sent}
        return (", " if left and self._sent else "") + _json(left)[1:]

    def _read(self, text: str) -> Iterator[str]:
        while self._is_open or self._begins(text):
            end = text.find(_END, self._at)
            value = text[self._at : self._safe_end(text) if end < 0 else end]
            if end < 0 and self._name and "null".startswith(value.lower()):
                return
            if end >= 0:
                value = value.removesuffix("\n")
            if self._name and value.lower() == "null":
                yield f"{self._name}null"
            else:
                begun = f'{self._name}"' if self._name else ""
                yield begun + _json(value)[1:-1] + ("" if end < 0 else '"')
            self._name = ""
            if end < 0:
                self._at += len(value)
                return
            self._at, self._is_open = end + len(_END), False

    def _safe_end(self, text: str) -> int:
        """Where that begins of an open value which may be its end."""
        tag = text.rfind("<", self._at)
        end = tag if tag >= 0 and _END.startswith(text[tag:]) else len(text)
        return end - 1 if text.endswith("\n", self._at, end) else end

    def _begins(self, text: str) -> bool:
        found = _PARAMETER.match(text, self._at)
        if found is None or found["name"] not in self._texts - self._sent:
            return False
        self._name = f"{', ' if self._sent else ''}{_json(found['name'])}: "
        self._sent.add(found["name"])
        self._at, self._is_open = found.end(), True
        return True


def _texts_of(tools: Sequence[Mapping[str, Any]], name: str) -> set[str]:
    functions = [tool.get("function") for tool in tools]
    schemas = [each.get("parameters") for each in functions if each and each.get("name") == name]
    properties = [schema.get("properties") for schema in schemas[:1] if isinstance(schema, dict)]
    known = [each for each in properties if isinstance(each, dict)]
    return {
        key
        for parameters in known
        for key, schema in parameters.items()
        if isinstance(schema, dict) and schema.get("type") == "string"
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# The tool calls in a part of a choice, and the text beside them.
CallsAndText = tuple[list[Call], str]


class ChoiceCalls:
    """The tool calls of one choice: `num_calls` so far. If it `is_streamed`, calls are sent before
    their end."""

    def __init__(
        self, workers: WorkerThreads, tokenizer: Any, tools: Any, is_streamed: bool
    ) -> None:
        self.num_calls = 0
        parser = tokenizer.tool_parser
        self._parse = partial(parse_calls, workers, parser, tools)
        self._marks = tokenizer.tool_call_start, tokenizer.tool_call_end
        # Of a whole answer nobody reads a part. The template may show tools to a model whose calls
        # mlx-lm cannot read.
        form = parser.__module__.rpartition(".")[2] if is_streamed and parser else ""
        if form == "qwen3_coder":
            self._new_call: Callable[[], OpenCall] = partial(TaggedCall, tools)
        else:
            self._new_call = partial(OpenCall, _HEADS.get(form, ()))
        self._open = self._new_call()

    async def take(self, delta: Delta) -> CallsAndText:
        """The calls in a part of the choice. Calls that the parser does not understand, or that are
        cut, are text, unless a stream has sent a piece of them: in streams arguments come in
        pieces, in the forms that `OpenCall` and `TaggedCall` read."""
        parts = [await self._ended(text, is_cut=False) for text in delta.calls]
        parts.append(([], delta.text))
        if delta.open_call is not None and delta.finish_reason is None:
            parts.append((list(self._pieces(self._open, delta.open_call)), ""))
        elif delta.open_call is not None:
            parts.append(await self._ended(delta.open_call, is_cut=True))
        calls = [call for found, _ in parts for call in found]
        return calls, "".join(text for _, text in parts)

    async def _ended(self, text: str, *, is_cut: bool) -> CallsAndText:
        opened, self._open = self._open, self._new_call()
        pieces = list(self._pieces(opened, text)) if opened.has_begun else []
        if opened.is_whole:
            return pieces, ""
        try:
            parsed = await self._parse(text)
            # Python's parsers take what no answer can hold: NaN, and halves of characters.
            json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
            if opened.has_begun:
                return [*pieces, self._piece(opened.rest(parsed["arguments"]))], ""
            whole = parsed if isinstance(parsed, list) else [parsed]
            calls = [
                _call(each, json.dumps(each["arguments"], ensure_ascii=False), number)
                for number, each in enumerate(whole, self.num_calls)
            ]
            self.num_calls += len(calls)
            if calls:
                return calls, ""
            why = "there is none"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        log.warning("a tool call could not be parsed: %s", why[:MOST_LOGGED])
        if opened.has_begun:
            return pieces, ""
        start, end = self._marks
        return [], f"{start}{text}{'' if is_cut else end}"

    def _pieces(self, opened: OpenCall, text: str) -> Iterator[Call]:
        for head, arguments in opened.take(text):
            if head is None:
                yield self._piece(arguments)
            else:
                self.num_calls += 1
                yield _call(head, arguments, self.num_calls - 1)

    def _piece(self, arguments: str) -> Call:
        return Call("", "", arguments, self.num_calls - 1)


def _call(head: Mapping[str, Any], arguments: str, index: int) -> Call:
    return Call(head.get("id") or str(uuid4()), head["name"], arguments, index)
