"""Says what a JSON schema says in keywords that llguidance knows, as far as that can be done.

A value that fits the new schema fits the old one. Where no other keywords say the same, the schema
keeps its own, and llguidance refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_KNOWN_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "unknown"),
}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_SCHEMAS = ("enum", "const", "default", "examples", "dependentRequired")
# What describes parts of the same value.
_APPLIED = {
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not"),
    *("dependentSchemas", "dependentRequired"),
}
# What properties these name depends on the value, or they name others than a few.
_DEPENDING = {
    *("anyOf", "oneOf", "if", "dependentSchemas", "patternProperties", "additionalProperties"),
    *("unevaluatedProperties", "$dynamicRef", "not"),
}
# Each makes two alternatives of one.
_MOST_DEPENDENT = 4


def equivalent_schema(schema: Mapping[str, Any]) -> Schema:
    """The same schema in keywords that llguidance knows.

    Args:
        schema: whose references lead to parts of itself. It is not changed.
    """
    try:
        return dict(_rewritten(schema, schema))
    except (AttributeError, TypeError):
        return dict(schema)  # llguidance says what is wrong with it


def referenced(root: Mapping[str, Any], reference: Any) -> Any:
    """The part of a schema that a reference leads to; None if it is none of the simple ones."""
    if reference == "#":
        return root
    document, _, path = str(reference).partition("#/")
    group, _, name = path.partition("/")
    parts = root.get(group) if not document and group in _BY_NAME else None
    return parts.get(name) if isinstance(parts, Mapping) else None


def _rewritten(part: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(part, list):
        return [_rewritten(item, root) for item in part]
    if isinstance(part, float) and part.is_integer():
        return int(part)  # as llguidance wants counts
    if not isinstance(part, Mapping):
        return part
    schema: Schema = {}
    for key, value in part.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            schema[key] = {name: _rewritten(inner, root) for name, inner in value.items()}
        else:
            schema[key] = value if key in _NO_SCHEMAS else _rewritten(value, root)
    _drop_without_effect(schema)
    _close_items(schema)
    _close_properties(schema, root)
    _divide(schema)
    return schema


def _drop_without_effect(schema: Schema) -> None:
    unused = {
        key
        for key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames")
        if schema.get(key) in (True, {})
    }
    if schema.get("format") not in _KNOWN_FORMATS:
        unused.add("format")  # a note, which validators may know or not
    if "if" not in schema:
        unused |= {"then", "else"}
    elif not schema.keys() & {"then", "else"}:
        unused.add("if")
    fits_none = schema.get("minContains") == 0 and "maxContains" not in schema
    if "contains" not in schema or fits_none:
        unused |= {"contains", "minContains", "maxContains"}
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        unused.add("uniqueItems")
    for key in unused & schema.keys():
        del schema[key]


def _close_items(schema: Schema) -> None:
    """Say what items may be that no part of the schema describes, by `items`."""
    if "items" in schema:
        schema.pop("unevaluatedItems", None)
    elif "unevaluatedItems" in schema and not schema.keys() & {*_APPLIED, "contains"}:
        schema["items"] = schema.pop("unevaluatedItems")


def _close_properties(schema: Schema, root: Mapping[str, Any]) -> None:
    """Say what properties may have that no part of the schema names, by `additionalProperties`.
    Of the parts of an `anyOf`, each is closed by itself, which allows fewer values."""
    if "unevaluatedProperties" not in schema or "oneOf" in schema:
        return
    if "additionalProperties" in schema:
        del schema["unevaluatedProperties"]
        return
    if not schema.keys() & _APPLIED:
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")
        return
    alternatives = schema.get("anyOf", [True])
    shared = {key: schema[key] for key in schema if key not in ("unevaluatedProperties", "anyOf")}
    names = _named([shared], root)
    branches = [_named([alternative], root) for alternative in alternatives]
    if names is None or None in branches:
        return
    rest = schema.pop("unevaluatedProperties")
    schema["anyOf"] = [
        {
            "allOf": [alternative],
            "properties": dict.fromkeys(sorted(names | (more or set())), True),
            "additionalProperties": rest,
        }
        for alternative, more in zip(alternatives, branches, strict=True)
    ]


def _named(schemas: list[Any], root: Mapping[str, Any]) -> set[str] | None:
    """The properties that schemas name, whatever the value; None if these depend on the value, or
    are not a few names."""
    names: set[str] = set()
    seen: set[str] = set()
    waiting = list(schemas)
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping) or schema.keys() & _DEPENDING:
            return None
        names.update(schema.get("properties", ()))
        waiting += schema.get("allOf", ())
        if "$ref" in schema and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            waiting.append(referenced(root, schema["$ref"]))
    return names


def _divide(schema: Schema) -> None:
    """Say what depends on a property by alternatives: with all of it, or without the property."""
    required, schemas = schema.get("dependentRequired", {}), schema.get("dependentSchemas", {})
    needs = [(name, {"required": others}) for name, others in required.items()]
    needs += [(name, {"allOf": [part]}) for name, part in schemas.items()]
    if not needs or len(needs) > _MOST_DEPENDENT:
        return
    schema.pop("dependentRequired", None)
    schema.pop("dependentSchemas", None)
    schema["allOf"] = [
        *schema.get("allOf", []),
        *({"anyOf": [_with(name, more), {"properties": {name: False}}]} for name, more in needs),
    ]


def _with(name: str, more: Schema) -> Schema:
    return {**more, "required": [name, *more.get("required", [])]}
