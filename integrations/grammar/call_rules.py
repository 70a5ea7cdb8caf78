"""Reads the schemas of tools' parameters, and writes rules of calls in llguidance's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paged_kv.integrations.grammar.equivalent_schemas import equivalent_schema
from paged_kv.integrations.grammar.text_patterns import ANY_TEXT, exactly

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
            never: what else must not come within the text.
            refused: regular expressions that must not match the whole text.
            before: a text before the mark.
        """
        first, *rest = self._parts(end)
        ends_text = first.startswith('"')  # nothing but the mark's letters says where it ends
        unfit = [f"({each}){exactly(before)}" for each in refused]
        if ends_text:
            unfit = [f"{each}{exactly(end)}" for each in unfit]
        behind = r"(.|\n)+" if ends_text else ANY_TEXT
        unfit += [f"{ANY_TEXT}{exactly(end)}{behind}"]
        if never:
            unfit += [f"{ANY_TEXT}({'|'.join(map(exactly, never))}){ANY_TEXT}"]
        matched = " & ".join(f"/{each}/" for each in patterns or [ANY_TEXT])
        closing = literal(before + end if ends_text else before)
        terminal = f"TEXT_{len(self._rules)}"
        self._append(terminal, f"(({matched}) {closing}) & ~/{'|'.join(unfit)}/")
        return self.rule(" ".join([terminal, *(rest if ends_text else [first, *rest])]))

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
