"""Writes values of parameters whose texts have no quotes, so that mlx-lm's parsers read them so.

A parser takes some texts for something else, such as `null` or `12`. What it reads depends on the
parameter's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paged_kv.integrations.grammar.call_rules import (
    DEFINITIONS,
    NOTES,
    CallRules,
    Schema,
    definitions,
    literal,
    single_types,
    type_of,
)
from paged_kv.integrations.grammar.text_patterns import ANY_TEXT, TRIMMED, text_patterns

_ALL = frozenset({"integer", "number", "boolean", "null", "object", "array"})

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


class Reading(NamedTuple):
    """How a parser reads the values of a parameter.

    Attributes:
        misread: regular expressions of texts that it takes for something else.
        takes_quotes: whether it takes a text between quotes too.
        types: those besides texts whose JSON it reads.
        has_python_words: whether true and false are `True` and `False`.
    """

    misread: tuple[str, ...] = ()
    takes_quotes: bool = False
    types: frozenset[str] = _ALL
    has_python_words: bool = False

    def beside(self, types: set[str]) -> Reading:
        """The same, where values of these types may stand in a text's place."""
        beginnings = {_BEGINNINGS[each] for each in types}
        return self._replace(misread=(*self.misread, *sorted(beginnings)))


def glm_reading(schema: Schema) -> Reading:
    """Of glm47, laguna and longcat."""
    return Reading() if schema.get("type") == "string" else Reading((_LITERAL,), takes_quotes=True)


def qwen_reading(schema: Schema) -> Reading:
    """Of qwen3_coder."""
    if "type" not in schema:
        return Reading((_NULL, _CONTAINER), types=frozenset({"null", "object", "array"}))
    if isinstance(schema["type"], str):
        return Reading((_NULL,))
    return Reading(
        (_NULL, _LITERAL),
        takes_quotes=True,
        types=frozenset({"integer", "number", "boolean", "null"}),
        has_python_words=True,
    )


def minimax_reading(schema: Schema) -> Reading:
    """Of minimax_m2 and minicpm5."""
    types = frozenset(_named_types(schema)) or frozenset({"string"})
    by_type = {
        "null": _NOTHING,
        "integer": _NUMBER,
        "number": _NUMBER,
        "boolean": _WORD,
        "object": _LITERAL,
        "array": _LITERAL,
    }
    misread = {by_type[each] for each in types if each in by_type}
    return Reading((_NULL, *sorted(misread)), types=types)


def muse_reading(schema: Schema) -> Reading:
    """Of muse_spark, which reads JSON whatever the schema says."""
    return Reading((_JSON,), takes_quotes=True)


def _named_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return {"string"}
    said = schema.get("type", [])
    found = {said} if isinstance(said, str) else set(said)
    found |= {type_of(value) for value in schema.get("enum", [])}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key, []):
            found |= _named_types(each) or {"string"}
    return found


_OF_TEXTS = {"type", "enum", "minLength", "maxLength", "pattern", "format", *DEFINITIONS, *NOTES}

# With these a text's spaces at its ends matter.
_LENGTHS = {"minLength", "maxLength", "pattern"}
_QUOTE = '"'
_UNESCAPED = r"[^\"\\\x00-\x1f]*"


class ValuePlace(NamedTuple):
    """Where a value stands.

    Attributes:
        end: the mark behind a value.
        never: other marks that end the call, or the value.
        before, after: texts around the mark.
        trims: whether the parser drops spaces at the ends of a text.
        wrapping: marks between which a text may stand, too.
    """

    end: str
    never: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    trims: bool = False
    wrapping: tuple[str, str] | None = None

    def closing(self, rules: CallRules) -> str:
        """The expression behind a value other than a text."""
        return f"{literal(self.before)} {rules.mark(self.end)} {literal(self.after)}"


def value(
    rules: CallRules, schema: Schema, place: ValuePlace, read: Callable[[Schema], Reading]
) -> str:
    """The expression of a value that fits a schema, and of the mark behind it.

    Args:
        schema: of the parameter, with the definitions that it refers to.
        read: how the parser reads values of such a parameter.

    Raises:
        ValueError: the parser cannot read all that fits, or a grammar cannot say what the schema
            does.
    """
    types = single_types(schema, definitions(schema))
    reading = read(schema).beside({each["type"] for each in types} - {"string"})
    written = []
    for each in types:
        if each["type"] == "string":
            written += _texts(rules, each, place, reading)
        elif each["type"] not in reading.types:
            raise ValueError(f"the parser of this form reads no {each['type']} of such a schema")
        else:
            written.append(f"{_other(rules, schema, each, reading)} {place.closing(rules)}")
    return " | ".join(written)


def text(rules: CallRules, schema: Schema, place: ValuePlace, misread: tuple[str, ...] = ()) -> str:
    """The expression of a text without quotes, and of the mark behind it.

    Raises:
        ValueError: a grammar cannot say what the schema does, or the parser misreads a value.
    """
    require_known(schema)
    after = literal(place.after)
    if "enum" in schema:
        values = " | ".join(literal(_plain_text(each, place, misread)) for each in schema["enum"])
        return f"({values}) {place.closing(rules)}"
    patterns = text_patterns(schema)
    trimmed = [*patterns, TRIMMED] if place.trims and _LENGTHS & schema.keys() else patterns
    if place.wrapping is None:
        raw = rules.text(trimmed, place.end, place.never, misread, place.before)
        return f"{raw} {after}"
    begin, end = place.wrapping
    outside = rules.text(trimmed, place.end, (*place.never, begin), misread, place.before)
    inside = rules.text(patterns, place.end, place.never, misread, end)
    return f"({outside} | {literal(begin)} {inside}) {after}"


def require_known(schema: Schema) -> None:
    """Raise ValueError if a text's schema says what no grammar can."""
    if unknown := schema.keys() - _OF_TEXTS:
        raise ValueError(f"texts without quotes cannot fit {', '.join(sorted(unknown))}")
    if "enum" in schema and (both := schema.keys() & _LENGTHS):
        raise ValueError(f"texts without quotes cannot fit enum and {', '.join(sorted(both))}")


def _texts(rules: CallRules, schema: Schema, place: ValuePlace, reading: Reading) -> list[str]:
    if not reading.takes_quotes:
        return [text(rules, schema, place, reading.misread)]
    if "enum" not in schema:
        inner = [*text_patterns(schema), _UNESCAPED]
        quoted = rules.text(inner, place.end, place.never, before=_QUOTE + place.before)
        raw = text(rules, schema, place, reading.misread)
        return [raw, f"{literal(_QUOTE)} {quoted} {literal(place.after)}"]
    written = []
    for each in schema["enum"]:
        try:
            said = _plain_text(each, place, reading.misread)
        except ValueError:
            said = json.dumps(each, ensure_ascii=False)
        written.append(f"{literal(said)} {place.closing(rules)}")
    return written


def _plain_text(said: str, place: ValuePlace, misread: tuple[str, ...]) -> str:
    is_trimmed = place.trims and said != said.strip()
    has_mark = any(mark in said for mark in (place.end, *place.never))
    if is_trimmed or has_mark or any(re.fullmatch(each, said) for each in misread):
        raise ValueError(f"{said!r} cannot stand without quotes")
    return said


def _other(rules: CallRules, schema: Schema, one: dict[str, Any], reading: Reading) -> str:
    if reading.has_python_words and one["type"] == "boolean":
        values = one.get("enum", [True, False])
        return f"({' | '.join(literal(str(each)) for each in values)})"
    return rules.json(one)
