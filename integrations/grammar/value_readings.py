"""How mlx-lm's parsers read the values of parameters whose texts have no quotes.

A parser takes some texts for something else, such as `null` or `12`. What it reads depends on the
parameter's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paged_kv.integrations.grammar.call_schemas import Schema, type_of
from paged_kv.integrations.grammar.text_patterns import ANY_TEXT

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
