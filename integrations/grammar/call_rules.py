"""Reads the schemas of tools' parameters, and writes rules of calls in llguidance's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paged_kv.integrations.grammar.equivalent_schemas import equivalent_schema, referenced
from paged_kv.integrations.grammar.text_patterns import ANY_TEXT, SOME_TEXT, exactly

# Parameters one by one repeat the definitions that they refer to.
_MOST_CHARACTERS = 1 << 21


class CallRules:
    """Rules by name, each used by the ones after it.

    Args:
        tokenizer: mlx-lm's. A mark that it has a token for can only come as this token.

    Raises:
        ValueError: of every method that makes a rule: they are too large together.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self._tokens = {str(token): number for number, token in added if _is_mark(token)}
        self._rules: list[str] = []
        self._characters = 0
        self._known: dict[str, str] = {}

    def grammar(self, start: str) -> str:
        """The grammar of a text that fits an expression of these rules."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def rule(self, expression: str) -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._append(name, expression)
        return name

    def shared_rule(self, key: str, expression: Callable[[], str]) -> str:
        """The name of the rule with this key, which may use itself.

        Args:
            key: of the rule.
            expression: makes it, if it is new.
        """
        if key not in self._known:
            self._known[key] = f"shared_{len(self._known)}"
            self._append(self._known[key], expression())
        return self._known[key]

    def json(self, schema: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> str:
        """A rule for JSON that fits a schema. Only spaces as of Python's `json.dumps` are
        possible, which all templates show."""
        spaced = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        guided = {**equivalent_schema(schema), "x-guidance": {**spaced, **(options or {})}}
        return self.rule(f"%json {json.dumps(guided)}")

    def mark(self, text: str) -> str:
        """The expression for a mark of the template."""
        return " ".join(self._parts(text)) or '""'

    def text(
        self,
        patterns: Sequence[str],
        end: str,
        never: Sequence[str],
        refused: Sequence[str] = (),
        before: str = "",
    ) -> str:
        """A rule for a text without quotes, and the mark behind it.

        Args:
            patterns: regular expressions that match the whole text.
            end: the mark.
            never: what else must not come within the text; not empty.
            refused: regular expressions that must not match the whole text.
            before: a text before the mark.
        """
        first, *rest = self._parts(end)
        is_token = not first.startswith('"')  # else its letters alone say where the text ends
        closing = before if is_token else before + end
        unfit = [
            *(f"({pattern}){exactly(closing)}" for pattern in refused),
            f"{ANY_TEXT}{exactly(end)}{ANY_TEXT if is_token else SOME_TEXT}",
            f"{ANY_TEXT}({'|'.join(map(exactly, never))}){ANY_TEXT}",
        ]
        matched = " & ".join(f"/{pattern}/" for pattern in patterns or [ANY_TEXT])
        terminal = f"TEXT_{len(self._rules)}"
        self._append(terminal, f"(({matched}) {literal(closing)}) & ~/{'|'.join(unfit)}/")
        return self.rule(" ".join([terminal, *([first, *rest] if is_token else rest)]))

    def _append(self, name: str, expression: str) -> None:
        self._characters += len(expression)
        if self._characters > _MOST_CHARACTERS:
            raise ValueError("the schemas of the tools are too large for a grammar")
        self._rules.append(f"{name}: {expression}")

    def _parts(self, text: str) -> list[str]:
        """A mark, divided into tokens of their own and other texts."""
        own = sorted((each for each in self._tokens if each in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, own))})", text) if own else [text]
        return [
            f"<[{self._tokens[part]}]>" if part in self._tokens else literal(part)
            for part in parts
            if part
        ]


def _is_mark(token: Any) -> bool:
    """Whether llguidance takes an added token for no text."""
    return bool(token.special) or re.fullmatch("<.*>", str(token)) is not None


def literal(text: str) -> str:
    """The expression for a text."""
    return json.dumps(text, ensure_ascii=False)


Schema = Mapping[str, Any]

# Keywords that say nothing of a value.
NOTES = {
    *("description", "title", "default", "examples", "deprecated", "readOnly"),
    *("$schema", "$id", "$comment", "strict"),
}
DEFINITIONS = {"$defs", "definitions"}
# References may lead to each other, and a few of them to very many schemas.
_MOST_STEPS = 256


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
    """Schemas of one type each; a value that fits one of them fits the schema.

    Args:
        schema: with the definitions that it refers to.

    Raises:
        ValueError: the schema names no type, or cannot be divided.
    """
    found = list(_divided(schema, iter(range(_MOST_STEPS))))
    if not found:
        raise ValueError("no value fits the schema")
    return found


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


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
    yield from _of_values(schema) if "enum" in schema or "const" in schema else _of_types(schema)


def _options(schema: Schema, key: str) -> list[Any]:
    if key == "$ref":
        target = referenced(_definitions(schema), schema[key])
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
        if not allowed or type_of(value) in allowed:
            by_type.setdefault(type_of(value), []).append(value)
    rest = {key: value for key, value in schema.items() if key not in ("const", "enum")}
    for kind, fitting in by_type.items():
        yield {**rest, "type": kind, "enum": fitting}


def _of_types(schema: Schema) -> Iterator[dict[str, Any]]:
    kinds = schema.get("type")
    if not kinds:
        raise ValueError("the schema names no type")
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        yield {**schema, "type": kind}


# Keywords of a tool's parameters that parameters one by one can fit.
_KNOWN = {"type", "properties", "required", "additionalProperties"}


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
    if unknown := parameters.keys() - _KNOWN - NOTES - DEFINITIONS:
        raise ValueError(f"parameters one by one cannot fit {', '.join(sorted(unknown))}")
    properties, required = parameters.get("properties", {}), set(parameters.get("required", ()))
    if not properties.keys() >= required:
        raise ValueError("a required parameter has no schema")
    # The rest after each parameter, whether one came before it or not.
    first, later = '""', '""'
    for key, schema in reversed(properties.items()):
        try:
            one = rules.rule(value(key, part_of(parameters, schema)))
        except ValueError as error:
            raise ValueError(f"the parameter {key}: {error}") from None
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
