"""Writes values of parameters whose texts have no quotes, so that mlx-lm's parsers read them so.

A parser takes some texts for something else, such as `null` or `12`. What it reads depends on the
parameter's schema.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from mlx_lm.tool_parsers.minimax_m2 import _extract_types_from_schema

from paged_kv.integrations.grammar.call_rules import (
    ANY_TEXT,
    TRIMMED,
    CallRules,
    literal,
    text_patterns,
)
from paged_kv.integrations.grammar.schemas import DEFINITIONS, NOTES, Schema, single_types

ALL_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})

# Sets of characters, some larger than needed: llguidance takes long for all spaces and digits of
# Unicode.
_SPACES, _DIGIT, _LETTER = r"[^!-~]*", r"[^\x00-\/:-\x7f]", r"[^\x00-\/:-@\[-\^`{-\x7f]"
_END = rf"([^0-9A-Za-z_]{ANY_TEXT})?"

_NULL = rf"{_SPACES}(?i:null){_SPACES}"
_NOTHING = rf"{_SPACES}(?i:none|nil){_SPACES}"
_CONTAINER = rf"{_SPACES}[\[{{]{ANY_TEXT}"
_JSON_NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?|NaN|-?Infinity"
_JSON = rf"{_SPACES}(({_JSON_NUMBER}|true|false|null){_SPACES}|[\"\[{{]{ANY_TEXT})"
# What Python's `literal_eval` or `json.loads` may read, and a little more.
_LITERAL = (
    rf"{_SPACES}([-+.'\"\[{{(\\#]{ANY_TEXT}|{_DIGIT}{ANY_TEXT}|[bBrRuU]{{1,2}}['\"]{ANY_TEXT}"
    rf"|(None|True|False|null|true|false|NaN|Infinity){_END}"
    rf"|{_LETTER}+[\s\\]*\({ANY_TEXT})"
)
_NUMBER = (
    rf"{_SPACES}[-+]?([-+.eE_]|{_DIGIT})*{_SPACES}|{_SPACES}[-+]?(?i:inf|infinity|nan){_SPACES}"
)
_WORD = rf"{_SPACES}(?i:true|1|yes|on|false|0|no|off){_SPACES}"

# llguidance takes the longest of the parts that may come, and a text goes on as far as its mark:
# so a text must not begin as another value does.
_BEGINNINGS = {
    "null": rf"{_SPACES}(?i:null){_END}",
    "boolean": rf"{_SPACES}(?i:true|false){_END}",
    "integer": rf"{_SPACES}-?[0-9]{ANY_TEXT}",
    "number": rf"{_SPACES}-?[0-9]{ANY_TEXT}",
    "array": rf"{_SPACES}\[{ANY_TEXT}",
    "object": rf"{_SPACES}\{{{ANY_TEXT}",
}
# What minimax_m2's parser makes values of these types.
_CONVERTED = {
    "null": _NOTHING,
    "boolean": _WORD,
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": _LITERAL,
    "object": _LITERAL,
}


class ValueSyntax(NamedTuple):
    """How a parser reads the values of a parameter."""

    # Regular expressions of texts that it takes for something else
    ambiguous_literals: tuple[str, ...] = ()
    takes_quotes: bool = False  # whether it takes a text between quotes too
    types: frozenset[str] = ALL_TYPES  # those besides texts whose JSON it reads
    has_python_words: bool = False  # whether true and false are `True` and `False`


AS_WRITTEN = ValueSyntax()


def glm_syntax(schema: Schema) -> ValueSyntax:
    """Of glm47, laguna and longcat."""
    if schema.get("type") == "string":
        return AS_WRITTEN
    return ValueSyntax((_LITERAL,), takes_quotes=True)


def qwen_syntax(schema: Schema) -> ValueSyntax:
    """Of qwen3_coder."""
    if "type" not in schema:
        return ValueSyntax((_NULL, _CONTAINER), types=frozenset({"null", "object", "array"}))
    if isinstance(schema["type"], str):
        return ValueSyntax((_NULL,))
    return ValueSyntax(
        (_NULL, _LITERAL),
        takes_quotes=True,
        types=ALL_TYPES - {"object", "array"},
        has_python_words=True,
    )


def minimax_syntax(schema: Schema) -> ValueSyntax:
    """Of minimax_m2 and minicpm5."""
    types = frozenset(_extract_types_from_schema(schema))
    return ValueSyntax(
        (_NULL, *sorted({_CONVERTED[name] for name in types & ALL_TYPES})), types=types
    )


def muse_syntax(schema: Schema) -> ValueSyntax:
    """Of muse_spark, which reads JSON whatever the schema says."""
    return ValueSyntax((_JSON,), takes_quotes=True)


# With these a text's spaces at its ends matter.
_LENGTHS = {"minLength", "maxLength", "pattern"}
_OF_TEXTS = {"type", "enum", "format", *_LENGTHS, *DEFINITIONS, *NOTES}
_QUOTE = '"'
_UNESCAPED = r"[^\"\\\x00-\x1f]*"


class ValueDelimiters(NamedTuple):
    """What stands around a value."""

    begin: str  # the text before it: `{0}` is the parameter's name, and `{1}` the value's type
    end: str  # the mark behind it
    never: tuple[str, ...] = ()  # other marks that end the call, or the value
    before: str = ""  # the text before the mark
    after: str = ""  # the text behind it
    trims: bool = False  # whether the parser drops spaces at the ends of a text
    wrapping: tuple[str, str] | None = None  # marks between which a text may stand, too
    quote: str = ""  # the mark before texts; then `end` stands behind texts alone

    def closing(self, rules: CallRules) -> str:
        """The expression behind a value that is no pattern."""
        return f"{literal(self.before)} {rules.mark(self.end)} {literal(self.after)}"


def value(
    rules: CallRules, key: str, schema: Schema, delimiters: ValueDelimiters, syntax: ValueSyntax
) -> str:
    """The expression of a parameter whose value fits a schema, and of the marks around it.

    Args:
        key: its name, as it is written.
        schema: with the definitions that it refers to.
        syntax: how the parser reads values of such a parameter.

    Raises:
        ValueError: the parser cannot read all that fits, or a grammar cannot say what the schema
            does.
    """
    types = single_types(schema)
    if "{1}" not in delimiters.begin and not delimiters.quote:
        # Values of these types may stand in a text's place.
        beginnings = {_BEGINNINGS[each["type"]] for each in types if each["type"] != "string"}
        literals = (*syntax.ambiguous_literals, *sorted(beginnings))
        syntax = syntax._replace(ambiguous_literals=literals)
    written = []
    for single in types:
        kind = single["type"]
        if kind == "string":
            one = text(rules, single, delimiters, syntax)
        elif kind not in syntax.types:
            raise ValueError(f"the parser of this form reads no {kind} of such a schema")
        else:
            if syntax.has_python_words and kind == "boolean":
                words = map(str, single.get("enum", [True, False]))
                one = f"({' | '.join(map(literal, words))})"
            else:
                one = rules.json(single)
            if not delimiters.quote:
                one = f"{one} {delimiters.closing(rules)}"
        written.append(f"{rules.mark(delimiters.begin.format(key, kind))} {one}")
    return " | ".join(written)


def text(
    rules: CallRules, schema: Schema, delimiters: ValueDelimiters, syntax: ValueSyntax = AS_WRITTEN
) -> str:
    """The expression of a text without quotes, and of the mark behind it.

    Raises:
        ValueError: a grammar cannot say what the schema does, or the parser misreads a value.
    """
    require_known(schema)
    quote = rules.mark(delimiters.quote)
    if "enum" in schema:
        constants = (literal(_constant(value, delimiters, syntax)) for value in schema["enum"])
        return f"{quote} ({' | '.join(constants)}) {delimiters.closing(rules)}"
    patterns, ambiguous = text_patterns(schema), syntax.ambiguous_literals
    trimmed = [*patterns, TRIMMED] if delimiters.trims and _LENGTHS & schema.keys() else patterns
    mark, never, before = delimiters.end, delimiters.never, delimiters.before
    begin, end = delimiters.wrapping or ("", "")
    outside = (*never, begin) if begin else never
    written = [rules.text(trimmed, mark, outside, ambiguous, before)]
    if begin:
        written.append(f"{literal(begin)} {rules.text(patterns, mark, never, ambiguous, end)}")
    if syntax.takes_quotes:
        quoted = rules.text([*patterns, _UNESCAPED], mark, never, before=_QUOTE + before)
        written.append(f"{literal(_QUOTE)} {quoted}")
    return f"{quote} ({' | '.join(written)}) {literal(delimiters.after)}"


def require_known(schema: Schema) -> None:
    """Raise ValueError if a text's schema says what no grammar can."""
    if unknown := schema.keys() - _OF_TEXTS:
        raise ValueError(f"texts without quotes cannot fit {', '.join(sorted(unknown))}")
    if "enum" in schema and (both := schema.keys() & _LENGTHS):
        raise ValueError(f"texts without quotes cannot fit enum and {', '.join(sorted(both))}")


def _constant(value: str, delimiters: ValueDelimiters, syntax: ValueSyntax) -> str:
    """A text as it stands, between quotes if it must."""
    has_mark = any(mark in value for mark in (delimiters.end, *delimiters.never))
    is_trimmed = delimiters.trims and value != value.strip()
    is_ambiguous = any(re.fullmatch(pattern, value) for pattern in syntax.ambiguous_literals)
    if not (has_mark or is_trimmed or is_ambiguous):
        return value
    if has_mark or not syntax.takes_quotes:
        raise ValueError(f"{value!r} cannot be written in this form")
    return json.dumps(value, ensure_ascii=False)
