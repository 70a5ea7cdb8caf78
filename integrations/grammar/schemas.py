"""Reads JSON schemas: divides them into types, and says them in keywords that llguidance knows.

A value that fits an equivalent schema fits the one that it was made of. Where no other keywords say
the same, a schema keeps its own, and llguidance refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

# Keywords that say nothing of a value.
NOTES = {
    *("description", "title", "default", "examples", "deprecated", "readOnly"),
    *("$schema", "$id", "$comment", "strict"),
}
DEFINITIONS = {"$defs", "definitions"}
# References may lead to each other, and a few of them to very many schemas.
_MOST_STEPS = 256

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


def equivalent_schema(schema: Schema) -> dict[str, Any]:
    """The same schema in keywords that llguidance knows; its references lead to parts of itself."""
    try:
        return dict(_rewritten(schema, schema))
    except (AttributeError, TypeError):
        return dict(schema)  # llguidance says what is wrong with it


def _referenced(root: Schema, reference: Any) -> Any:
    """The part of a schema that a reference leads to; None if it is none of the simple ones."""
    if reference == "#":
        return root
    document, _, path = str(reference).partition("#/")
    group, _, name = path.partition("/")
    parts = root.get(group) if not document and group in _BY_NAME else None
    return parts.get(name) if isinstance(parts, Mapping) else None


def _rewritten(part: Any, root: Schema) -> Any:
    if isinstance(part, list):
        return [_rewritten(item, root) for item in part]
    if isinstance(part, float) and part.is_integer():
        return int(part)  # as llguidance wants counts
    if not isinstance(part, Mapping):
        return part
    schema: dict[str, Any] = {}
    for key, value in part.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            schema[key] = {name: _rewritten(inner, root) for name, inner in value.items()}
        else:
            schema[key] = value if key in _NO_SCHEMAS else _rewritten(value, root)
    _drop_without_effect(schema)
    # What items may be that no part of the schema describes.
    if "items" in schema:
        schema.pop("unevaluatedItems", None)
    elif "unevaluatedItems" in schema and not schema.keys() & {*_APPLIED, "contains"}:
        schema["items"] = schema.pop("unevaluatedItems")
    _close_properties(schema, root)
    _divide_dependent(schema)
    return schema


def _drop_without_effect(schema: dict[str, Any]) -> None:
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


def _close_properties(schema: dict[str, Any], root: Schema) -> None:
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
    names = _named(shared, root)
    branches = [_named(alternative, root) for alternative in alternatives]
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


def _named(part: Any, root: Schema) -> set[str] | None:
    """The properties that a schema names, whatever the value; None if these depend on the value, or
    are not a few names."""
    names: set[str] = set()
    seen: set[str] = set()
    waiting = [part]
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
            waiting.append(_referenced(root, schema["$ref"]))
    return names


def _divide_dependent(schema: dict[str, Any]) -> None:
    """Say what depends on a property by alternatives: with all of it, or without the property."""
    required, schemas = schema.get("dependentRequired", {}), schema.get("dependentSchemas", {})
    needs: list[tuple[str, dict[str, Any]]] = [
        *((name, {"required": [name, *others]}) for name, others in required.items()),
        *((name, {"allOf": [part], "required": [name]}) for name, part in schemas.items()),
    ]
    if not needs or len(needs) > _MOST_DEPENDENT:
        return
    schema.pop("dependentRequired", None)
    schema.pop("dependentSchemas", None)
    schema["allOf"] = [
        *schema.get("allOf", []),
        *({"anyOf": [more, {"properties": {name: False}}]} for name, more in needs),
    ]


def part_of(schema: Schema, part: Any) -> dict[str, Any]:
    """A part of a schema, with the definitions that its references lead to.

    Raises:
        ValueError: it is no schema that a value fits.
    """
    if part is not True and not isinstance(part, Mapping):
        raise ValueError("the schema names no type")
    return {**({} if part is True else part), **_definitions(schema)}


def _definitions(schema: Schema) -> Schema:
    return {key: schema[key] for key in sorted(DEFINITIONS & schema.keys())}


def single_types(schema: Schema) -> list[dict[str, Any]]:
    """Schemas of one type each; a value that fits one of them fits the schema, which has the
    definitions that it refers to.

    Raises:
        ValueError: the schema names no type, or cannot be divided.
    """
    found = list(_divided(schema, iter(range(_MOST_STEPS))))
    if not found:
        raise ValueError("no value fits the schema")
    return found


def _divided(schema: Any, steps: Iterator[int]) -> Iterator[dict[str, Any]]:
    if next(steps, None) is None:
        raise ValueError("the schema has too many parts")
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        if key in schema:
            rest = {other: value for other, value in schema.items() if other != key}
            options = _options(schema, key)
            parts = [list(_divided(_joined(rest, option), steps)) for option in options]
            if key == "oneOf":
                _require_apart(parts)
            yield from (single for part in parts for single in part)
            return
    if "enum" in schema or "const" in schema:
        yield from _of_values(schema)
        return
    if not (kinds := schema.get("type")):
        raise ValueError("the schema names no type")
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        yield {**schema, "type": kind}


def _options(schema: Schema, key: str) -> list[Any]:
    if key == "$ref":
        target = _referenced(_definitions(schema), schema[key])
        if target is None:
            raise ValueError(f"{schema[key]} leads to no definition")
        return [target]
    if key == "allOf" and len(schema[key]) != 1:
        raise ValueError("allOf of several schemas cannot be divided")
    return list(schema[key])


def _joined(rest: Schema, option: Any) -> dict[str, Any]:
    if not isinstance(option, Mapping):
        raise ValueError("the schema names no type")
    if both := {key for key in rest.keys() & option.keys() if rest[key] != option[key]} - NOTES:
        raise ValueError(f"{', '.join(sorted(both))} is said twice")
    return {**rest, **option}


def _require_apart(parts: list[list[dict[str, Any]]]) -> None:
    """Raise ValueError if a value may fit two of these."""
    kinds = [{single["type"].replace("integer", "number") for single in part} for part in parts]
    if sum(map(len, kinds)) > len(set().union(*kinds)):
        raise ValueError("a value may fit two schemas of oneOf: use anyOf")


def _of_values(schema: Schema) -> Iterator[dict[str, Any]]:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if "const" in schema and "enum" in schema:
        raise ValueError("const and enum are both said")
    declared = schema.get("type")
    allowed = {declared} if isinstance(declared, str) else set(declared or ())
    if "number" in allowed:
        allowed.add("integer")
    by_type: dict[str, list[Any]] = {}
    for value in values:
        if not allowed or _type_of(value) in allowed:
            by_type.setdefault(_type_of(value), []).append(value)
    rest = {key: value for key, value in schema.items() if key not in ("const", "enum")}
    for kind, fitting in by_type.items():
        yield {**rest, "type": kind, "enum": fitting}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def sorted_by_name(parameters: Schema) -> dict[str, Any]:
    """The same schema, its properties in the order of Jinja's `dictsort`."""
    properties = sorted(parameters.get("properties", {}).items(), key=lambda item: item[0].lower())
    return {**parameters, "properties": dict(properties)}
