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
    in_order,
    literal,
    part_of,
    single_types,
    sorted_by_name,
)
from paged_kv.integrations.grammar.value_syntax import (
    ValueDelimiters,
    ValueSyntax,
    glm_syntax,
    minimax_syntax,
    muse_syntax,
    qwen_syntax,
    require_known,
    text,
    value,
)

WriteCall = Callable[[CallRules, str, Schema], str]
SyntaxOf = Callable[[Schema], ValueSyntax]

# Python reads other escapes of JSON as other texts.
_PYTHON_ESCAPES = {"json_allowed_escapes": 'nrtbf\\"'}


class CallForm(NamedTuple):
    """How a model writes calls.

    Attributes:
        call: the expression of a call of a tool, from its name and the schema of its parameters.
        before, after: the expressions around the calls within one pair of marks.
        between: the text between these calls; None for one call within each pair.
        around: the expressions before and after an answer that is nothing but calls, in a model
            whose answers have marks of their own; None in others.
    """

    call: WriteCall
    before: str = '""'
    between: str | None = None
    after: str = '""'
    around: Callable[[CallRules], tuple[str, str]] | None = None


def form_of(tokenizer: Any) -> CallForm | None:
    """The form in which a model writes calls; None if no grammar can describe it."""
    parser = tokenizer.tool_parser
    name = "" if parser is None else parser.__module__.rpartition(".")[2]
    if name == "mistral" and "[ARGS]" in tokenizer.get_vocab():
        return CallForm(_after_name)
    return _FORMS.get(name)


def _as_object(rules: CallRules, name: str, parameters: Schema) -> str:
    head = literal(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f'{head} {rules.json(parameters)} "}}"'


def _after_name(rules: CallRules, name: str, parameters: Schema) -> str:
    return f"{literal(_plain(name))} {rules.mark('[ARGS]')} {rules.json(parameters)}"


def _numbered(rules: CallRules, name: str, parameters: Schema) -> str:
    head = rules.mark(f"<|tool_call_begin|>functions.{_plain(name)}:")
    argument, end = map(rules.mark, ("<|tool_call_argument_begin|>", "<|tool_call_end|>"))
    return f"{head} /[0-9]{{1,3}}/ {argument} {rules.json(parameters)} {end}"


def _python(rules: CallRules, name: str, parameters: Schema) -> str:
    def argument(key: str, schema: Schema) -> str:
        if not key.isidentifier() or iskeyword(key):
            raise ValueError(f"{key!r} is no name in Python")
        return f"{literal(f'{key}=')} {rules.json(schema, _PYTHON_ESCAPES)}"

    inner = in_order(rules, parameters, argument, between='", "')
    return f'{literal(f"{_plain(name)}(")} {inner} ")"'


def _tagged(
    head: str, opening: str, delimiters: ValueDelimiters, end: str, syntax_of: SyntaxOf
) -> WriteCall:
    """A call whose parameters stand between tags, texts without quotes. `{}` in heads is the name
    of the tool, or of the parameter."""

    def call(rules: CallRules, name: str, parameters: Schema) -> str:
        # Each parser takes the end of a call wherever it comes.
        never = (*delimiters.never, rules.tokenizer.tool_call_end)
        within_call = delimiters._replace(never=never)

        def argument(key: str, schema: Schema) -> str:
            begun = rules.mark(opening.format(_plain(key)))
            return f"{begun} ({value(rules, schema, within_call, syntax_of(schema))})"

        inner = in_order(rules, parameters, argument)
        return f"{rules.mark(head.format(_plain(name)))} {inner} {rules.mark(end)}"

    return call


def _glm(prefix: str) -> WriteCall:
    key, argument = f"{prefix}arg_key", f"{prefix}arg_value"
    delimiters = ValueDelimiters(f"</{argument}>", trims=True)
    return _tagged("{}\n", f"<{key}>{{}}</{key}>\n<{argument}>", delimiters, "\n", glm_syntax)


def _longcat(rules: CallRules, name: str, parameters: Schema) -> str:
    # mlx-lm's parser knows a call without any parameter by its JSON alone.
    write = _glm("longcat_") if parameters.get("required") else _as_object
    return write(rules, name, parameters)


QUOTE, _GEMMA_END = '<|"|>', "<tool_call|>"
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
_OF_ARRAYS = {"type", "items", "minItems", "maxItems"}
_ANY: Schema = {"type": ["string", "number", "boolean", "null", "array", "object"]}
# A model that must write a list may find no end.
_MOST_KEYS = 64
_COMMA = '","'


def _gemma(rules: CallRules, name: str, parameters: Schema) -> str:
    head = "call:" + _plain(name, r"[\w-]+") + "{"
    return f'{literal(head)} {_gemma_entries(rules, parameters)} "}}"'


def _gemma_entries(rules: CallRules, schema: Schema) -> str:
    """The expression of an object's entries, sorted as templates of these models write them."""

    def entry(key: str, part: Schema) -> str:
        return f'{_gemma_key(rules, key)} ":" {_gemma_value(rules, part)}'

    return in_order(rules, sorted_by_name(schema), entry, between=_COMMA)


def _gemma_key(rules: CallRules, key: str) -> str:
    return literal(key) if re.fullmatch(r"\w+", key) else _gemma_constant(rules, key)


def _gemma_value(rules: CallRules, schema: Schema) -> str:
    fitting = schema if schema.keys() - DEFINITIONS else {**schema, **_ANY}
    return f"({' | '.join(_gemma_single(rules, single) for single in single_types(fitting))})"


def _gemma_single(rules: CallRules, schema: Schema) -> str:
    """A value of one type."""
    kind = schema["type"]
    if kind == "string":
        require_known(schema)
    if "enum" in schema:
        return f"({' | '.join(_gemma_constant(rules, value) for value in schema['enum'])})"
    if kind == "string":
        return f"{rules.mark(QUOTE)} {text(rules, schema, ValueDelimiters(QUOTE, (_GEMMA_END,)))}"
    if kind not in ("array", "object"):
        return rules.json(schema)
    known = _OF_ARRAYS if kind == "array" else _OF_OBJECTS
    if unknown := schema.keys() - known - NOTES - DEFINITIONS:
        raise ValueError(f"arguments of this form cannot fit {', '.join(sorted(unknown))}")
    write = _gemma_array if kind == "array" else _gemma_object
    # Parts of the tools' schemas, which live meanwhile: each is made once, whatever refers to it.
    parts = [id(schema.get(key)) for key in sorted(known - {"type"})]
    return rules.shared_rule(f"{kind} {parts}", lambda: write(rules, schema))


def _gemma_array(rules: CallRules, schema: Schema) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems", "")
    items = part_of(schema, schema.get("items", True))
    if most == 0:
        return '"[]"'
    item = rules.rule(_gemma_value(rules, items))
    bounds = f"{max(0, least - 1)},{most and most - 1}"
    others = item if most == 1 else f'{item} ("," {item}){{{bounds}}}'
    return f'"[" {others} "]"' if least else f'"[" ({others})? "]"'


def _gemma_object(rules: CallRules, schema: Schema) -> str:
    others = schema.get("additionalProperties", True)
    if schema.get("properties") or others is False:
        return f'"{{" {_gemma_entries(rules, schema)} "}}"'
    if schema.get("required"):
        raise ValueError("a required parameter has no schema")
    part = _gemma_value(rules, part_of(schema, others))
    entry = rules.rule(f'/[A-Za-z_][A-Za-z_0-9]*/ ":" {part}')
    return f'"{{" ({entry} ("," {entry}){{0,{_MOST_KEYS - 1}}})? "}}"'


def _gemma_constant(rules: CallRules, value: Any) -> str:
    if isinstance(value, str):
        if QUOTE in value or _GEMMA_END in value:
            raise ValueError(f"{value!r} cannot be written")
        return f"{rules.mark(QUOTE)} {literal(value)} {rules.mark(QUOTE)}"
    if isinstance(value, list):
        return f'"[" {_COMMA.join(_gemma_constant(rules, item) for item in value)} "]"'
    if isinstance(value, Mapping):
        entries = [
            f'{_gemma_key(rules, key)} ":" {_gemma_constant(rules, item)}'
            for key, item in value.items()
        ]
        return f'"{{" {_COMMA.join(entries)} "}}"'
    return literal(json.dumps(value))


def _function_gemma(rules: CallRules, name: str, parameters: Schema) -> str:
    # The first brace ends the call, and the first comma a value without marks.
    delimiters = ValueDelimiters("<escape>", never=("}", rules.tokenizer.tool_call_end))

    def single_value(schema: Schema) -> str:
        if schema["type"] == "string":
            return f"{rules.mark('<escape>')} {text(rules, schema, delimiters)}"
        if schema["type"] in ("array", "object"):
            raise ValueError(f"this form has no {schema['type']}")
        return rules.json(schema)

    def argument(key: str, schema: Schema) -> str:
        values = map(single_value, single_types(schema))
        return f"{literal(f'{_plain(key)}:')} ({' | '.join(values)})"

    head = "call:" + _plain(name, r"\w+") + "{"
    inner = in_order(rules, sorted_by_name(parameters), argument, between=_COMMA)
    return f'{literal(head)} {inner} "}}"'


def _kimi_k3(rules: CallRules, name: str, parameters: Schema) -> str:
    ends = ("<|close|>call<|sep|>", "<|close|>json<|sep|>", rules.tokenizer.tool_call_end)
    delimiters = ValueDelimiters("<|close|>argument<|sep|>", never=ends)

    def single_argument(key: str, schema: Schema) -> str:
        kind = schema["type"]
        head = rules.mark(f'<|open|>argument key="{_escaped(key)}" type="{kind}"<|sep|>')
        if kind == "string":
            return f"{head} {text(rules, schema, delimiters)}"
        return f"{head} {rules.json(schema)} {delimiters.closing(rules)}"

    def argument(key: str, schema: Schema) -> str:
        return " | ".join(single_argument(key, single) for single in single_types(schema))

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


def _plain(name: str, allowed: str = r"[\w.-]+") -> str:
    if not re.fullmatch(allowed, name):
        raise ValueError(f"{name!r} cannot stand without quotes")
    return name


_QWEN = _tagged(
    "\n<function={}>\n",
    "<parameter={}>\n",
    ValueDelimiters("</parameter>", before="\n", after="\n"),
    "</function>\n",
    qwen_syntax,
)
_MINIMAX = _tagged(
    '<invoke name="{}">\n',
    '<parameter name="{}">',
    ValueDelimiters("</parameter>", ("</invoke>",), after="\n", trims=True),
    "</invoke>\n",
    minimax_syntax,
)
_MINICPM = _tagged(
    '"{}">',
    '<param name="{}">',
    ValueDelimiters("</param>", trims=True, wrapping=("<![CDATA[", "]]>")),
    "",
    minimax_syntax,
)
_MUSE = _tagged(
    '<atem:invoke name="{}">\n',
    '<atem:parameter name="{}">',
    ValueDelimiters("</atem:parameter>", after="\n", trims=True),
    "</atem:invoke>\n",
    muse_syntax,
)
_FORMS = {
    "json_tools": CallForm(_as_object, before='"\\n"?', after='"\\n"?'),
    "mistral": CallForm(_as_object, before='"["', between=", ", after='"]"'),
    "kimi_k2": CallForm(_numbered, between=""),
    "pythonic": CallForm(_python, before='"["', between=", ", after='"]"'),
    "glm47": CallForm(_glm("")),
    "laguna": CallForm(_glm("")),
    "longcat": CallForm(_longcat),
    "qwen3_coder": CallForm(_QWEN),
    "minimax_m2": CallForm(_MINIMAX, before='"\\n"', between=""),
    "minicpm5": CallForm(_MINICPM),
    "gemma4": CallForm(_gemma),
    "function_gemma": CallForm(_function_gemma),
    "kimi_k3": CallForm(_kimi_k3, between="", around=_around_kimi_k3),
    "muse_spark": CallForm(_MUSE, before='"\\n"', between="", around=_around_muse),
}
