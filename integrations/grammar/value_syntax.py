"""Writes parameters whose texts have no quotes, so that mlx-lm's parsers read them so.

A parser takes some texts for something else, such as `null` or `12`. What it reads depends on the
parameter's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from mlx_lm.tool_parsers.minimax_m2 import _extract_types_from_schema

from paged_kv.integrations.grammar.call_rules import (
    ANY_TEXT,
    TRIMMED,
    CallRules,
    literal,
    text_patterns,
)
from paged_kv.integrations.grammar.schemas import (
    DEFINITIONS,
    NOTES,
    Schema,
    single_types,
    sorted_by_name,
)

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


def plain(name: str, allowed: str = r"[\w.-]+") -> str:
    if not re.fullmatch(allowed, name):
        raise ValueError(f"{name!r} cannot stand without quotes")
    return name


@dataclass(frozen=True)
class Arguments:
    """Parameters one by one: texts without quotes, and JSON of other types. The methods raise
    ValueError if the parser cannot read all that fits a schema, or a grammar cannot say what the
    schema does."""

    begin: str  # the text before a value: `{0}` is the parameter's name, and `{1}` the value's type
    end: str  # the mark behind it
    # How the parser reads values, by the parameter's schema
    syntax_of: Callable[[Schema], ValueSyntax] = lambda schema: AS_WRITTEN
    never: tuple[str, ...] = ()  # other marks that end the call, or the value
    before: str = ""  # the text before the mark
    after: str = ""  # the text behind it
    trims: bool = False  # whether the parser drops spaces at the ends of a text
    wrapping: tuple[str, str] | None = None  # marks between which a text may stand, too
    quote: str = ""  # the mark before texts; then `end` stands behind texts alone
    between: str = ""  # the text between two parameters; then they are sorted
    written: Callable[[str], str] = plain  # a parameter's name as it is written

    def __call__(self, rules: CallRules, schema: Schema) -> str:
        """The expression of a call's parameters."""
        # Each parser takes the end of a call wherever it comes.
        within_call = replace(self, never=(*self.never, rules.tokenizer.tool_call_end))
        ordered = sorted_by_name(schema) if self.between else schema
        return rules.in_order(ordered, partial(within_call.argument, rules), self.between)

    def argument(self, rules: CallRules, key: str, schema: Schema) -> str:
        """The expression of a parameter whose value fits a schema, and of the marks around it."""
        types, syntax = single_types(schema), self.syntax_of(schema)
        if "{1}" not in self.begin and not self.quote:
            # Values of these types may stand in a text's place.
            beginnings = {_BEGINNINGS[each["type"]] for each in types if each["type"] != "string"}
            literals = (*syntax.ambiguous_literals, *sorted(beginnings))
            syntax = syntax._replace(ambiguous_literals=literals)
        written = []
        for single in types:
            kind = single["type"]
            if kind == "string":
                one = self.text(rules, single, syntax)
            elif kind not in syntax.types:
                raise ValueError(f"the parser of this form reads no {kind} of such a schema")
            else:
                if syntax.has_python_words and kind == "boolean":
                    words = map(str, single.get("enum", [True, False]))
                    one = f"({' | '.join(map(literal, words))})"
                else:
                    one = rules.json(single)
                if not self.quote:
                    one = f"{one} {self._closing(rules)}"
            written.append(f"{rules.mark(self.begin.format(self.written(key), kind))} {one}")
        return " | ".join(written)

    def text(self, rules: CallRules, schema: Schema, syntax: ValueSyntax = AS_WRITTEN) -> str:
        """The expression of a text without quotes, and of the mark behind it."""
        if unknown := schema.keys() - _OF_TEXTS:
            raise ValueError(f"texts without quotes cannot fit {', '.join(sorted(unknown))}")
        if "enum" in schema and (both := schema.keys() & _LENGTHS):
            raise ValueError(f"texts without quotes cannot fit enum and {', '.join(sorted(both))}")
        quote = rules.mark(self.quote)
        if "enum" in schema:
            constants = (literal(self._constant(value, syntax)) for value in schema["enum"])
            return f"{quote} ({' | '.join(constants)}) {self._closing(rules)}"
        patterns, ambiguous = text_patterns(schema), syntax.ambiguous_literals
        trimmed = [*patterns, TRIMMED] if self.trims and _LENGTHS & schema.keys() else patterns
        begin, end = self.wrapping or ("", "")
        outside = (*self.never, begin) if begin else self.never
        written = [rules.text(trimmed, self.end, outside, ambiguous, self.before)]
        if begin:
            wrapped = rules.text(patterns, self.end, self.never, ambiguous, end)
            written.append(f"{literal(begin)} {wrapped}")
        if syntax.takes_quotes:
            quoted = [*patterns, _UNESCAPED]
            closed = rules.text(quoted, self.end, self.never, before=_QUOTE + self.before)
            written.append(f"{literal(_QUOTE)} {closed}")
        return f"{quote} ({' | '.join(written)}) {literal(self.after)}"

    def _closing(self, rules: CallRules) -> str:
        """The expression behind a value that is no pattern."""
        return f"{literal(self.before)} {rules.mark(self.end)} {literal(self.after)}"

    def _constant(self, value: str, syntax: ValueSyntax) -> str:
        """A text as it stands, between quotes if it must."""
        has_mark = any(mark in value for mark in (self.end, *self.never))
        is_trimmed = self.trims and value != value.strip()
        is_ambiguous = any(re.fullmatch(pattern, value) for pattern in syntax.ambiguous_literals)
        if not (has_mark or is_trimmed or is_ambiguous):
            return value
        if has_mark or not syntax.takes_quotes:
            raise ValueError(f"{value!r} cannot be written in this form")
        return json.dumps(value, ensure_ascii=False)
