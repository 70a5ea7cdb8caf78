"""Writes the arguments of Gemma 4's calls: JSON with other quotes, and names without any."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paged_kv.integrations.grammar.call_parameters import in_order, sorted_by_name
from paged_kv.integrations.grammar.call_rules import CallRules, literal
from paged_kv.integrations.grammar.call_schemas import (
    DEFINITIONS,
    NOTES,
    Schema,
    single_types,
)
from paged_kv.integrations.grammar.parameter_values import Place, require_known, text

QUOTE = '<|"|>'
_TEXT = Place(QUOTE, never=("<tool_call|>",))
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
_OF_ARRAYS = {"type", "items", "minItems", "maxItems"}
_ANY: Schema = {"type": ["string", "number", "boolean", "null", "array", "object"]}
# A model that must write a list may find no end.
_MOST_KEYS = 64
_JOINT = ' "," '


def gemma_value(rules: CallRules, schema: Any, shared: Schema) -> str:
    """The expression of a value that fits a schema.

    Args:
        rules: to add to. The schema must live as long.
        shared: `definitions` that the schema may refer to.

    Raises:
        ValueError: a grammar cannot say what the schema does.
    """
    if schema is True or schema == {}:
        schema = _ANY
    written = [_one_type(rules, each, shared) for each in single_types(schema, shared)]
    return f"({' | '.join(written)})"


def gemma_entries(rules: CallRules, schema: Schema, shared: Schema) -> str:
    """The expression of an object's entries, sorted as templates of these models write them.

    Args:
        shared: `definitions` that the schema may refer to.

    Raises:
        ValueError: a grammar cannot say what the schema does.
    """

    def entry(key: str, one: Schema) -> str:
        return f'{_name(rules, key)} ":" {gemma_value(rules, one, shared)}'

    return in_order(rules, sorted_by_name(schema), entry, between='","')


def _name(rules: CallRules, name: str) -> str:
    if re.fullmatch(r"\w+", name):
        return literal(name)
    if QUOTE in name:
        raise ValueError(f"{name!r} cannot be written")
    return f"{rules.mark(QUOTE)} {literal(name)} {rules.mark(QUOTE)}"


def _one_type(rules: CallRules, schema: Schema, shared: Schema) -> str:
    kind = schema["type"]
    if "enum" in schema:
        if kind == "string":
            require_known(schema)
        return f"({' | '.join(_constant(rules, each) for each in schema['enum'])})"
    if kind == "string":
        return f"{rules.mark(QUOTE)} {text(rules, schema, _TEXT)}"
    if kind not in ("array", "object"):
        return rules.json(schema)
    known = _OF_ARRAYS if kind == "array" else _OF_OBJECTS
    if unknown := schema.keys() - known - NOTES - {*DEFINITIONS}:
        raise ValueError(f"arguments of this form cannot fit {', '.join(sorted(unknown))}")
    make = _array if kind == "array" else _object
    # Parts of the tools' schemas, which live meanwhile: each is made once, whatever refers to it.
    parts = [id(schema.get(each)) for each in sorted(known - {"type"})]
    return rules.shared_rule(f"{kind} {parts}", lambda: make(rules, schema, shared))


def _array(rules: CallRules, schema: Schema, shared: Schema) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems", "")
    if schema.get("items") is False:
        raise ValueError("arguments of this form cannot fit items: false")
    if most == 0:
        return '"[]"'
    item = rules.rule(gemma_value(rules, schema.get("items", True), shared))
    bounds = f"{max(0, least - 1)},{most and most - 1}"
    others = item if most == 1 else f'{item} ("," {item}){{{bounds}}}'
    return f'"[" {others} "]"' if least else f'"[" ({others})? "]"'


def _object(rules: CallRules, schema: Schema, shared: Schema) -> str:
    properties = schema.get("properties", {})
    if not properties and schema.get("additionalProperties", True) is not False:
        return _mapping(rules, schema, shared)
    return f'"{{" {gemma_entries(rules, schema, shared)} "}}"'


def _mapping(rules: CallRules, schema: Schema, shared: Schema) -> str:
    if schema.get("required"):
        raise ValueError("a required parameter has no schema")
    entry = rules.rule(
        f'/[A-Za-z_][A-Za-z_0-9]*/ ":" '
        f"{gemma_value(rules, schema.get('additionalProperties', True), shared)}"
    )
    return f'"{{" ({entry} ("," {entry}){{0,{_MOST_KEYS - 1}}})? "}}"'


def _constant(rules: CallRules, value: Any) -> str:
    if isinstance(value, str):
        if QUOTE in value or _TEXT.never[0] in value:
            raise ValueError(f"{value!r} cannot be written")
        return f"{rules.mark(QUOTE)} {literal(value)} {rules.mark(QUOTE)}"
    if isinstance(value, list):
        return f'"[" {_JOINT.join(_constant(rules, each) for each in value)} "]"'
    if isinstance(value, Mapping):
        entries = (f'{_name(rules, key)} ":" {_constant(rules, each)}'
                   for key, each in value.items())  # fmt: skip
        return f'"{{" {_JOINT.join(entries)} "}}"'
    return literal(json.dumps(value))
