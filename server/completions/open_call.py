"""Reads the arguments of calls while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


class Piece(NamedTuple):
    """What was written of a call.

    Attributes:
        head: its name, and its id if the model gives it one; None if it began with another piece.
        arguments: the pieces of a call together are JSON, if the model writes JSON.
    """

    head: dict[str, Any] | None
    arguments: str


class OpenCall:
    """Reads a text of calls that grows. This one reads nothing, for forms that have no other.

    Attributes:
        has_begun: whether any piece was read.
        is_whole: whether nothing but such pieces follows.
    """

    def __init__(self) -> None:
        self.has_begun = self.is_whole = False
        # The text before is read.
        self._at = 0

    def take(self, text: str) -> Iterator[Piece]:
        """The pieces that are new in a text, which begins with the one before."""
        return iter(())

    def rest(self, arguments: dict[str, Any]) -> str:
        """The last piece, by what the parser makes of the whole text."""
        return ""


def open_call(form: str, tools: Sequence[Mapping[str, Any]]) -> OpenCall:
    """A reader for texts of the form of this parser."""
    if form == "qwen3_coder":
        return TaggedCall(tools)
    return JSONCalls(_HEADS[form]) if form in _HEADS else OpenCall()


class JSONCalls(OpenCall):
    """Reads arguments that are JSON.

    Args:
        heads: what may be before them.
    """

    def __init__(self, heads: Sequence[re.Pattern[str]]) -> None:
        super().__init__()
        self._heads = heads
        # Within the arguments: in how many objects and lists, and in which part of a text.
        self._depth = 0
        self._is_text = self._is_escaped = False

    def take(self, text: str) -> Iterator[Piece]:
        while self._at < len(text):
            head = None
            if not self._depth:
                found = self._head(text)
                if found is None:
                    return
                self._at, head = found.end(), found.groupdict()
            self.has_begun = self.is_whole = True
            yield Piece(head, "".join(self._read(text)))

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
    parameter that is not a text: the parser knows how other values are to be read.

    Args:
        tools: of the request.
    """

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
            yield Piece(found.groupdict(), "{")
        if written := "".join(self._read(text)):
            yield Piece(None, written)

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
