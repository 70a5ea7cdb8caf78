"""Says what a JSON schema says in keywords that llguidance knows, as far as that can be done.

A value that fits the new schema fits the old one. Where no other keywords say the same, the schema
keeps its own, and llguidance refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

_KNOWN_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "unknown"),
}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
# Each makes two alternatives of one.
_MOST_DEPENDENT = 4


def equivalent_schema(schema: Mapping[str, Any]) -> Schema:
    """The same schema in keywords that llguidance knows.

    Args:
        schema: whose references lead to parts of itself. It is not changed.
    """
    try:
        return dict(_Rewriting(schema).rewritten(schema))
    except (AttributeError, TypeError):
        return dict(schema)  # llguidance says what is wrong with it


class _Rewriting:
    """Of a schema, to which references lead."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        said = {key: self._inner(key, value) for key, value in schema.items()}
        for rewrite in _SIMPLE:
            rewrite(said)
        self._close_properties(said)
        _divide(said)
        return said

    def _inner(self, key: str, value: Any) -> Any:
        if key in _BY_NAME and isinstance(value, Mapping):
            return {name: self.rewritten(each) for name, each in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.rewritten(each) for each in value]
        return self.rewritten(value) if key in _SINGLE else value

    def _close_properties(self, said: Schema) -> None:
        """Say what properties may have that no part of the schema names, by
        `additionalProperties`. Of the parts of an `anyOf`, each is closed by itself, which allows
        fewer values."""
        if "unevaluatedProperties" not in said or "oneOf" in said:
            return
        rest = said["unevaluatedProperties"]
        if not said.keys() & {*_APPLIED, "additionalProperties"}:
            said["additionalProperties"] = said.pop("unevaluatedProperties")
            return
        names = self._named({key: said[key] for key in said if key not in _REST}, set())
        branches = [self._named(each, set()) for each in said.get("anyOf", [])]
        if "additionalProperties" in said:
            del said["unevaluatedProperties"]
        elif names is not None and None not in branches:
            del said["unevaluatedProperties"]
            if branches:
                said["anyOf"] = [
                    {"allOf": [each], **_closed({}, names | (more or set()), rest)}
                    for each, more in zip(said["anyOf"], branches, strict=True)
                ]
            else:
                said.update(_closed(said.get("properties", {}), names, rest))

    def _named(self, schema: Any, seen: set[str]) -> set[str] | None:
        """The properties that a schema names, whatever the value; None if these depend on the
        value, or are not a few names. References that were seen add nothing."""
        if isinstance(schema, bool):
            return set()
        if not isinstance(schema, Mapping) or schema.keys() & _DEPENDING:
            return None
        names = set(schema.get("properties", ()))
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            parts.append(referenced(self._root, schema["$ref"]))
        for part in parts:
            more = self._named(part, seen)
            if more is None:
                return None
            names |= more
        return names


def referenced(root: Mapping[str, Any], reference: Any) -> Any:
    """The part of a schema that a reference leads to; None if it is none of the simple ones."""
    if reference == "#":
        return root
    document, _, path = str(reference).partition("#/")
    group, _, name = path.partition("/")
    parts = root.get(group) if not document and group in _BY_NAME else None
    return parts.get(name) if isinstance(parts, Mapping) else None


# What describes parts of the same value.
_APPLIED = {
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not"),
    *("dependentSchemas", "dependentRequired"),
}
_REST = {"unevaluatedProperties", "anyOf"}
_DEPENDING = {
    *("anyOf", "oneOf", "if", "dependentSchemas", "patternProperties", "additionalProperties"),
    *("unevaluatedProperties", "$dynamicRef", "not"),
}


def _closed(properties: Mapping[str, Any], names: set[str], rest: Any) -> Schema:
    others = dict.fromkeys(sorted(names - properties.keys()), True)
    return {"properties": {**properties, **others}, "additionalProperties": rest}


def _divide(said: Schema) -> None:
    """Say what depends on a property by alternatives: with all of it, or without the property."""
    needs = [(name, {"required": others})
             for name, others in said.get("dependentRequired", {}).items()]  # fmt: skip
    needs += [(name, {"allOf": [each]})
              for name, each in said.get("dependentSchemas", {}).items()]  # fmt: skip
    if not needs or len(needs) > _MOST_DEPENDENT:
        return
    _drop(said, "dependentRequired", "dependentSchemas")
    said["allOf"] = [
        *said.get("allOf", []),
        *({"anyOf": [_with(name, more), {"properties": {name: False}}]} for name, more in needs),
    ]


def _with(name: str, more: Schema) -> Schema:
    return {**more, "required": [name, *more.get("required", [])]}


def _whole_counts(said: Schema) -> None:
    for key in _COUNTS:
        if isinstance(said.get(key), float) and said[key].is_integer():
            said[key] = int(said[key])


def _known_formats(said: Schema) -> None:
    # A format is a note; validators may know it or not.
    if said.get("format") not in _KNOWN_FORMATS:
        said.pop("format", None)


def _without_effect(said: Schema) -> None:
    if "if" not in said:
        _drop(said, "then", "else")
    elif not said.keys() & {"then", "else"}:
        _drop(said, "if")
    if said.get("minContains") == 0 and "maxContains" not in said:
        _drop(said, "contains")
    if "contains" not in said:
        _drop(said, "minContains", "maxContains")
    if said.get("uniqueItems") is False or said.get("maxItems") in (0, 1):
        _drop(said, "uniqueItems")
    for key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        if said.get(key) in (True, {}):
            _drop(said, key)


def _closed_items(said: Schema) -> None:
    """Say what items may be that no part of the schema describes, by `items`."""
    if "unevaluatedItems" not in said:
        return
    if "items" in said:
        _drop(said, "unevaluatedItems")
    elif not said.keys() & {*_APPLIED, "contains"}:
        said["items"] = said.pop("unevaluatedItems")


def _drop(said: Schema, *keys: str) -> None:
    for key in keys:
        said.pop(key, None)


_SIMPLE: tuple[Callable[[Schema], None], ...] = (
    _whole_counts,
    _known_formats,
    _without_effect,
    _closed_items,
)
