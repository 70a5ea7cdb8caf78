"""The forms in which models write calls of tools, one for each of mlx-lm's parsers.

Each form is a function that gives the expression of one call in llguidance's Lark syntax, between
the marks with which calls start and end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from keyword import iskeyword
from typing import Any, NamedTuple

from paged_kv.integrations.grammar.call_rules import (
    DEFINITIONS,
    NOTES,
    CallRules,
    Schema,
    definitions,
    in_order,
    literal,
    single_types,
    sorted_by_name,
)
from paged_kv.integrations.grammar.value_readings import (
    Reading,
    ValuePlace,
    glm_reading,
    minimax_reading,
    muse_reading,
    qwen_reading,
    require_known,
    text,
    value,
)

QUOTE = '<|"|>'
_TEXT = ValuePlace(QUOTE, never=("<tool_call|>",))
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


# Python reads other escapes of JSON as other texts.
_PYTHON_ESCAPES = {"json_allowed_escapes": 'nrtbf\\"'}


class CallForm(NamedTuple):
    """How a model writes calls.

    Attributes:
        call: the expression of a call of a tool, from its name and the schema of its parameters.
        before, between, after: the calls within one pair of marks; without `between` there is
            one call within each pair.
        around: the expressions before and after an answer that is nothing but calls, in a model
            whose answers have marks of their own; None in others.
    """

    call: Callable[[CallRules, str, Schema], str]
    before: str = ""
    between: str | None = None
    after: str = ""
    around: Callable[[CallRules], tuple[str, str]] | None = None


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
    def argument(key: str, schema: Schema) -> str:
        if not key.isidentifier() or iskeyword(key):
            raise ValueError(f"{key!r} is no name in Python")
        return f"{literal(f'{key}=')} {rules.json(schema, _PYTHON_ESCAPES)}"

    inner = in_order(rules, parameters, argument, between='", "')
    return f'{literal(f"{_plain(name)}(")} {inner} ")"'


def _tagged(
    head: str, opening: str, place: ValuePlace, end: str, read: Callable[[Schema], Reading]
) -> Callable[..., str]:
    """A call whose parameters stand between tags, texts without quotes. `{}` in heads is the name
    of the tool, or of the parameter."""

    def call(rules: CallRules, name: str, parameters: Schema) -> str:
        # Each parser takes the end of a call wherever it comes.
        its = place._replace(never=(*place.never, rules.tokenizer.tool_call_end))

        def argument(key: str, schema: Schema) -> str:
            return f"{_marked(rules, opening, key)} ({value(rules, schema, its, read)})"

        inner = in_order(rules, parameters, argument)
        return f"{_marked(rules, head, name)} {inner} {rules.mark(end)}"

    return call


def _marked(rules: CallRules, template: str, name: str) -> str:
    return rules.mark(template.format(_plain(name)))


def _of_longcat(rules: CallRules, name: str, parameters: Schema) -> str:
    # mlx-lm's parser knows a call without any parameter by its JSON alone.
    if not parameters.get("required"):
        return _as_object(rules, name, parameters)
    return _LONGCAT(rules, name, parameters)


def _of_gemma(rules: CallRules, name: str, parameters: Schema) -> str:
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"{name!r} cannot stand without quotes")
    entries = gemma_entries(rules, parameters, definitions(parameters))
    return f'{literal(f"call:{name}{{")} {entries} "}}"'


def _of_function_gemma(rules: CallRules, name: str, parameters: Schema) -> str:
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"{name!r} cannot stand without quotes")
    # The first brace ends the call, and the first comma a value without marks.
    place = ValuePlace("<escape>", never=("}", rules.tokenizer.tool_call_end))

    def one(schema: Schema) -> str:
        if schema["type"] == "string":
            return f"{rules.mark('<escape>')} {text(rules, schema, place)}"
        if schema["type"] in ("array", "object"):
            raise ValueError(f"this form has no {schema['type']}")
        return rules.json(schema)

    def argument(key: str, schema: Schema) -> str:
        types = single_types(schema, definitions(schema))
        return f"{literal(f'{_plain(key)}:')} ({' | '.join(map(one, types))})"

    inner = in_order(rules, sorted_by_name(parameters), argument, between='","')
    return f'{literal(f"call:{name}{{")} {inner} "}}"'


def _of_kimi_k3(rules: CallRules, name: str, parameters: Schema) -> str:
    ends = ("<|close|>call<|sep|>", "<|close|>json<|sep|>", rules.tokenizer.tool_call_end)
    place = ValuePlace("<|close|>argument<|sep|>", never=ends)

    def one(key: str, schema: Schema) -> str:
        kind = schema["type"]
        head = f'<|open|>argument key="{_escaped(key)}" type="{kind}"<|sep|>'
        if kind == "string":
            return f"{rules.mark(head)} {text(rules, schema, place)}"
        return f"{rules.mark(head)} {rules.json(schema)} {place.closing(rules)}"

    def argument(key: str, schema: Schema) -> str:
        types = single_types(schema, definitions(schema))
        return " | ".join(one(key, each) for each in types)

    head = rules.mark(f'<|open|>call tool="{_escaped(name)}" index="')
    begun, end = rules.mark('"<|sep|>'), rules.mark("<|close|>call<|sep|>")
    return f"{head} /[1-9][0-9]?/ {begun} {in_order(rules, parameters, argument)} {end}"


def _around_kimi_k3(rules: CallRules) -> tuple[str, str]:
    """The answer's text, which is empty, may be open already."""
    begin, end, last = map(rules.mark, rules.tokenizer.structural_markers)
    return f"(({begin})? {end})?", f"({last})?"


def _around_muse(rules: CallRules) -> tuple[str, str]:
    """Thoughts, and who gets the calls."""
    message, end = rules.mark("<|message|>"), "<|eom|>"
    thoughts = rules.text([], end, never=("<atem:function_calls>",))
    again = rules.mark("<|start|>assistant")
    name = rules.rule(r"/[\w.-]{1,64}/")
    return f'(" "? "to=self" {message} {thoughts} {again})? " "? "to=" {name} {message}', '""'


def _escaped(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


def _plain(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{name!r} cannot stand without quotes")
    return name


_GLM = CallForm(
    _tagged(
        "{}\n",
        "<arg_key>{}</arg_key>\n<arg_value>",
        ValuePlace("</arg_value>", trims=True),
        "\n",
        glm_reading,
    )
)
_LONGCAT = _tagged(
    "{}\n",
    "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
    ValuePlace("</longcat_arg_value>", trims=True),
    "\n",
    glm_reading,
)
_QWEN = _tagged(
    "\n<function={}>\n",
    "<parameter={}>\n",
    ValuePlace("</parameter>", before="\n", after="\n"),
    "</function>\n",
    qwen_reading,
)
_MINIMAX = _tagged(
    '<invoke name="{}">\n',
    '<parameter name="{}">',
    ValuePlace("</parameter>", ("</invoke>",), after="\n", trims=True),
    "</invoke>\n",
    minimax_reading,
)
_MINICPM = _tagged(
    '"{}">',
    '<param name="{}">',
    ValuePlace("</param>", trims=True, wrapping=("<![CDATA[", "]]>")),
    "",
    minimax_reading,
)
_MUSE = _tagged(
    '<atem:invoke name="{}">\n',
    '<atem:parameter name="{}">',
    ValuePlace("</atem:parameter>", after="\n", trims=True),
    "</atem:invoke>\n",
    muse_reading,
)
_FORMS = {
    "json_tools": CallForm(_on_its_line),
    "mistral": CallForm(_as_object, before="[", between=", ", after="]"),
    "kimi_k2": CallForm(_numbered, between=""),
    "pythonic": CallForm(_python, before="[", between=", ", after="]"),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": CallForm(_of_longcat),
    "qwen3_coder": CallForm(_QWEN),
    "minimax_m2": CallForm(_MINIMAX, before="\n", between=""),
    "minicpm5": CallForm(_MINICPM),
    "gemma4": CallForm(_of_gemma),
    "function_gemma": CallForm(_of_function_gemma),
    "kimi_k3": CallForm(_of_kimi_k3, between="", around=_around_kimi_k3),
    "muse_spark": CallForm(_MUSE, before="\n", between="", around=_around_muse),
}
