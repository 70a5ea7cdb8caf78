"""The forms in which models write calls of tools: those of mlx-lm's parsers that a grammar can
describe.

Each form is a function that gives the expression of one call in llguidance's Lark syntax, between
the marks with which calls start and end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paged_kv.integrations.grammar.call_rules import CallRules, literal

Schema = Mapping[str, Any]
# Keywords of a tool's parameters that parameters one by one can fit.
_OF_PARAMETERS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_NOTES = {"description", "title", "$schema", "$comment", "$id", "strict"}
_ONE_TYPE = {"integer", "number", "boolean", "object", "array"}


class CallForm(NamedTuple):
    """How a model writes calls.

    Attributes:
        call: the expression of a call of a tool, from its name and the schema of its parameters.
        before, between, after: the calls within one pair of marks; without `between` there is
            one call within each pair.
    """

    call: Callable[[CallRules, str, Schema], str]
    before: str = ""
    between: str | None = None
    after: str = ""


def form_of(tokenizer: Any) -> CallForm | None:
    """The form in which a model writes calls; None if no grammar can describe it."""
    parser = tokenizer.tool_parser
    name = "" if parser is None else parser.__module__.rpartition(".")[2]
    if name == "mistral" and "[ARGS]" in tokenizer.get_vocab():
        return CallForm(_with_mark("[ARGS]"))
    return _FORMS.get(name)


def _as_object(rules: CallRules, name: str, parameters: Schema) -> str:
    head = literal(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f'{head} {rules.json(parameters)} "}}"'


def _on_its_line(rules: CallRules, name: str, parameters: Schema) -> str:
    return f'"\\n"? {_as_object(rules, name, parameters)} "\\n"?'


def _with_mark(mark: str) -> Callable[[CallRules, str, Schema], str]:
    def call(rules: CallRules, name: str, parameters: Schema) -> str:
        return f"{literal(_plain(name))} {rules.mark(mark)} {rules.json(parameters)}"

    return call


def _numbered(rules: CallRules, name: str, parameters: Schema) -> str:
    begin, argument, end = map(
        rules.mark,
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    )
    head = f"{begin} {literal(f'functions.{_plain(name)}:')} /[0-9]{{1,3}}/ {argument}"
    return f"{head} {rules.json(parameters)} {end}"


def _python(rules: CallRules, name: str, parameters: Schema) -> str:
    # Python reads other escapes of JSON as other texts.
    escapes = {"json_allowed_escapes": 'nrtbf\\"'}

    def value(key: str, schema: Schema) -> str:
        return f"{literal(f'{key}=')} {rules.json(schema, escapes)}"

    inner = _in_order(rules, parameters, value, between='", "')
    return f'{literal(f"{_plain(name)}(")} {inner} ")"'


def _tagged(head: str, value_head: str, value_end: str, end: str) -> Callable[..., str]:
    """A call whose parameters stand between tags, texts without quotes. `{}` in heads is the name
    of the tool, or of the parameter."""

    def call(rules: CallRules, name: str, parameters: Schema) -> str:
        def value(key: str, schema: Schema) -> str:
            opening = literal(value_head.format(_plain(key)))
            if schema.get("type") == "string":
                return f"{opening} {rules.text_until(value_end, schema)}"
            if schema.get("type") not in _ONE_TYPE:
                raise ValueError(f"the parameter {key} has no type, or several")
            return f"{opening} {rules.json(schema)} {rules.mark(value_end)}"

        inner = _in_order(rules, parameters, value)
        return f"{literal(head.format(_plain(name)))} {inner} {literal(end)}"

    return call


def _of_longcat(rules: CallRules, name: str, parameters: Schema) -> str:
    # mlx-lm's parser knows a call without any parameter by its JSON alone.
    if not parameters.get("required"):
        return _as_object(rules, name, parameters)
    return _LONGCAT(rules, name, parameters)


def _in_order(
    rules: CallRules,
    parameters: Schema,
    value: Callable[[str, Schema], str],
    between: str = "",
) -> str:
    """The parameters of a call one after the other, in the schema's order; those that are not
    required may be left out.

    Raises:
        ValueError: the schema says more than which parameters there are.
    """
    if unknown := parameters.keys() - _OF_PARAMETERS - _NOTES:
        raise ValueError(f"parameters one by one cannot fit {', '.join(sorted(unknown))}")
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    required = set(parameters.get("required", ()))
    properties = parameters.get("properties", {})
    if not properties.keys() >= required:
        raise ValueError("a required parameter has no schema")
    # The rest after each parameter, whether one came before it or not.
    first, later = '""', '""'
    for key, schema in reversed(properties.items()):
        one = rules.rule(value(key, {**shared, **_described(schema)}))
        whole, joined = f"{one} {later}", f"{between} {one} {later}"
        if key in required:
            first, later = rules.rule(whole), rules.rule(joined)
        else:
            first, later = rules.rule(f"{whole} | {first}"), rules.rule(f"{joined} | {later}")
    return first


def _described(schema: Any) -> Schema:
    return schema if isinstance(schema, dict) else {}


def _plain(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{name!r} cannot stand without quotes")
    return name


_GLM = CallForm(_tagged("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "\n"))
_LONGCAT = _tagged(
    "{}\n",
    "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
    "</longcat_arg_value>",
    "\n",
)
_FORMS = {
    "json_tools": CallForm(_on_its_line),
    "mistral": CallForm(_as_object, before="[", between=", ", after="]"),
    "kimi_k2": CallForm(_numbered, between=""),
    "pythonic": CallForm(_python, before="[", between=", ", after="]"),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": CallForm(_of_longcat),
    "qwen3_coder": CallForm(
        _tagged("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n")
    ),
    "minimax_m2": CallForm(
        _tagged('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"),
        before="\n",
        between="",
    ),
    "minicpm5": CallForm(_tagged('"{}">', '<param name="{}">', "</param>", "")),
}
