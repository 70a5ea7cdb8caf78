"""Reads the schemas of tools' parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

NOTES = {"description", "title", "default", "examples", "$comment", "deprecated", "readOnly"}
DEFINITIONS = ("$defs", "definitions")
# References may lead to each other, and a few of them to very many schemas.
_MOST_STEPS = 256


def definitions(schema: Schema) -> Schema:
    """What references of a schema lead to."""
    return {key: schema[key] for key in DEFINITIONS if key in schema}


def single_types(schema: Any, shared: Schema) -> list[dict[str, Any]]:
    """Schemas of one type each; a value that fits one of them fits the schema.

    Args:
        schema: of a parameter.
        shared: `definitions` of the schema that it is part of.

    Raises:
        ValueError: the schema names no type, or cannot be divided.
    """
    found = list(_divided(schema, shared, iter(range(_MOST_STEPS))))
    if not found:
        raise ValueError("no value fits the schema")
    return found


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _divided(schema: Any, shared: Schema, steps: Iterator[int]) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, Mapping):
        raise ValueError("the schema names no type")
    if next(steps, None) is None:
        raise ValueError("the schema has too many parts")
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        if key in schema:
            rest = {each: value for each, value in schema.items() if each != key}
            options = _options(key, schema[key], shared)
            parts = [list(_divided(_joined(rest, each), shared, steps)) for each in options]
            if key == "oneOf":
                _require_apart(parts)
            yield from (each for part in parts for each in part)
            return
    yield from _of_values(schema) if "enum" in schema or "const" in schema else _of_types(schema)


def _options(key: str, said: Any, shared: Schema) -> list[Any]:
    if key == "$ref":
        return [_target(said, shared)]
    if key == "allOf" and len(said) != 1:
        raise ValueError("allOf of several schemas cannot be divided")
    return list(said)


def _target(reference: Any, shared: Schema) -> Any:
    root, _, path = str(reference).partition("#/")
    group, _, name = path.partition("/")
    if root or name not in shared.get(group, {}):
        raise ValueError(f"{reference} leads to no definition")
    return shared[group][name]


def _joined(rest: Schema, option: Any) -> dict[str, Any]:
    if not isinstance(option, Mapping):
        raise ValueError("the schema names no type")
    if both := {key for key in rest.keys() & option.keys() if rest[key] != option[key]} - NOTES:
        raise ValueError(f"{', '.join(sorted(both))} is said twice")
    return {**rest, **option}


def _require_apart(parts: list[list[dict[str, Any]]]) -> None:
    """Raise ValueError if a value may fit two of these."""
    kinds = [{"number" if each["type"] == "integer" else each["type"] for each in part}
             for part in parts]  # fmt: skip
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
        if not allowed or type_of(value) in allowed:
            by_type.setdefault(type_of(value), []).append(value)
    rest = {key: value for key, value in schema.items() if key not in ("const", "enum")}
    for kind, fitting in by_type.items():
        yield {**rest, "type": kind, "enum": fitting}


def _of_types(schema: Schema) -> Iterator[dict[str, Any]]:
    said = schema.get("type")
    for kind in [said] if isinstance(said, str) else said or ():
        yield {**schema, "type": kind}
    if not said:
        raise ValueError("the schema names no type")
