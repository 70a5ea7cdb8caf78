"""Describes what a text must fit. Nothing here is compiled, or needs llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# A message may quote the whole grammar.
MOST_TOLD = 300


class GrammarError(ValueError):
    """A grammar is wrong, too large, or too slow."""


class Grammar(NamedTuple):
    """What a whole text must fit.

    Attributes:
        kind: "json_schema", "regex", "choice" or "grammar".
        text: JSON of a schema; a regular expression; JSON of a list of texts; or a grammar in
            llguidance's Lark syntax, or llama.cpp's GBNF.
    """

    kind: str
    text: str


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """JSON that fits a schema of draft 2020-12. Its properties come in the schema's order."""
    return Grammar("json_schema", json.dumps(schema))


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """A text that a regular expression matches as a whole."""
    return Grammar("regex", pattern)


def choice(texts: Sequence[str]) -> Grammar:
    """One of several texts."""
    return Grammar("choice", json.dumps(list(texts)))


def lark(text: str) -> Grammar:
    """A text of a context-free grammar, in llguidance's Lark syntax or in llama.cpp's GBNF."""
    return Grammar("grammar", text)


def one_line(message: str) -> str:
    """llguidance's message in one line, without the state of its parser."""
    words = " ".join(message.partition("<state>")[0].split())
    return words[:MOST_TOLD] or "the grammar does not compile"
