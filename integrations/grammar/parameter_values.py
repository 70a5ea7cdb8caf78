"""Writes the values of parameters whose texts have no quotes, for mlx-lm's parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from paged_kv.integrations.grammar.call_rules import CallRules, literal
from paged_kv.integrations.grammar.call_schemas import (
    DEFINITIONS,
    NOTES,
    Schema,
    definitions,
    single_types,
)
from paged_kv.integrations.grammar.text_patterns import TRIMMED, text_patterns
from paged_kv.integrations.grammar.value_readings import Reading

_OF_TEXTS = {"type", "enum", "minLength", "maxLength", "pattern", "format", *DEFINITIONS, *NOTES}

# With these a text's spaces at its ends matter.
_LENGTHS = {"minLength", "maxLength", "pattern"}
_QUOTE = '"'
_UNESCAPED = r"[^\"\\\x00-\x1f]*"


class Place(NamedTuple):
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


def value(rules: CallRules, schema: Schema, place: Place, read: Callable[[Schema], Reading]) -> str:
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


def text(rules: CallRules, schema: Schema, place: Place, misread: tuple[str, ...] = ()) -> str:
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


def _texts(rules: CallRules, schema: Schema, place: Place, reading: Reading) -> list[str]:
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


def _plain_text(said: str, place: Place, misread: tuple[str, ...]) -> str:
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
