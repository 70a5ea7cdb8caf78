"""Writes the parameters of a call one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_kv.integrations.grammar.call_rules import CallRules
from paged_kv.integrations.grammar.call_schemas import DEFINITIONS, Schema, definitions

# Keywords of a tool's parameters that parameters one by one can fit.
_KNOWN = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
_NOTES = {"description", "title", "$schema", "$comment", "$id", "strict", "default", "examples"}


def in_order(
    rules: CallRules,
    parameters: Schema,
    value: Callable[[str, Schema], str],
    between: str = "",
) -> str:
    """The parameters of a call in the schema's order; those that are not required may be left out.

    Args:
        value: the expression of a parameter, from its name and its schema with the definitions
            that this refers to.
        between: the expression between two parameters.

    Raises:
        ValueError: the schema says more than which parameters there are, or `value` raises it.
    """
    if unknown := parameters.keys() - _KNOWN - _NOTES:
        raise ValueError(f"parameters one by one cannot fit {', '.join(sorted(unknown))}")
    shared, required = definitions(parameters), set(parameters.get("required", ()))
    properties = parameters.get("properties", {})
    if not properties.keys() >= required:
        raise ValueError("a required parameter has no schema")
    # The rest after each parameter, whether one came before it or not.
    first, later = '""', '""'
    for key, schema in reversed(properties.items()):
        one = rules.rule(_told(key, value, {**shared, **_described(schema)}))
        whole, joined = f"{one} {later}", f"{between} {one} {later}"
        if key in required:
            first, later = rules.rule(whole), rules.rule(joined)
        else:
            first, later = rules.rule(f"{whole} | {first}"), rules.rule(f"{joined} | {later}")
    return first


def sorted_by_name(parameters: Schema) -> dict[str, Any]:
    """The same schema, its properties in the order of Jinja's `dictsort`."""
    properties = sorted(parameters.get("properties", {}).items(), key=lambda item: item[0].lower())
    return {**parameters, "properties": dict(properties)}


def _told(key: str, value: Callable[[str, Schema], str], schema: Schema) -> str:
    try:
        return value(key, schema)
    except ValueError as error:
        raise ValueError(f"the parameter {key}: {error}") from None


def _described(schema: Any) -> Schema:
    return schema if isinstance(schema, dict) else {}
