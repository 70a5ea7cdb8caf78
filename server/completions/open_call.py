"""Reads the arguments of calls while the model writes them, in the forms that have them as JSON."""

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
    """Reads a text of calls that grows.

    Args:
        form: the name of mlx-lm's parser for it. Of forms that it does not know it reads nothing.

    Attributes:
        has_begun: whether any piece was read.
    """

    def __init__(self, form: str) -> None:
        self.has_begun = False
        self._heads = _HEADS.get(form, ())
        # The text before is read; within the arguments, how deep in objects and lists it ends.
        self._at = self._depth = 0
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
            self.has_begun = True
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
