"""The forms in which models write calls of tools, one for each of mlx-lm's parsers, as expressions
in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from keyword import iskeyword
from typing import Any, NamedTuple

from paged_kv.integrations.grammar.call_rules import CallRules, literal
from paged_kv.integrations.grammar.schemas import (
    DEFINITIONS,
    NOTES,
    Schema,
    part_of,
    single_types,
    sorted_by_name,
)
from paged_kv.integrations.grammar.value_syntax import (
    ALL_TYPES,
    Arguments,
    ValueSyntax,
    glm_syntax,
    minimax_syntax,
    muse_syntax,
    plain,
    qwen_syntax,
)


def _escaped(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


class CallForm(NamedTuple):
    """How a model writes calls."""

    head: str  # the text before the parameters: `{}` is the tool's name, and `#` the call's number
    # The expression of the parameters, from their schema
    parameters: Callable[[CallRules, Schema], str] = CallRules.json
    end: str = ""  # the text behind them
    before: str = '""'  # the expression before the calls within one pair of marks
    between: str | None = None  # the text between these calls; None for one call within each pair
    after: str = '""'  # the expression behind the calls within one pair of marks
    # The expressions before and after an answer that is nothing but calls, in a model whose answers
    # have marks of their own; None in others.
    around: Callable[[CallRules], tuple[str, str]] | None = None
    # A tool's name as it is written. It raises ValueError if it cannot be.
    written: Callable[[str], str] = plain
    number: str = ""  # the regular expression of the call's number
    # The form of a call that needs no parameter, if that is another
    optional: CallForm | None = None

    def call(self, rules: CallRules, name: str, parameters: Schema) -> str:
        """The expression of one call of a tool, from the schema of its parameters."""
        if self.optional and not parameters.get("required"):
            return self.optional.call(rules, name, parameters)
        written = self.written(name)
        parts = [rules.mark(part.format(written)) for part in self.head.split("#")]
        head = f" /{self.number}/ ".join(parts)
        return f"{head} {self.parameters(rules, parameters)} {rules.mark(self.end)}"


def form_of(tokenizer: Any) -> CallForm | None:
    """The form in which a model writes calls; None if no grammar can describe it."""
    parser = tokenizer.tool_parser
    name = "" if parser is None else parser.__module__.rpartition(".")[2]
    if name == "mistral" and "[ARGS]" in tokenizer.get_vocab():
        return CallForm("{}[ARGS]")
    return _FORMS.get(name)


# Python reads other escapes of JSON as other texts.
_PYTHON_ESCAPES = {"json_allowed_escapes": 'nrtbf\\"'}


def _python(rules: CallRules, parameters: Schema) -> str:
    """Arguments by keyword."""

    def argument(key: str, schema: Schema) -> str:
        if not key.isidentifier() or iskeyword(key):
            raise ValueError(f"{key!r} is no name in Python")
        return f"{literal(f'{key}=')} {rules.json(schema, _PYTHON_ESCAPES)}"

    return rules.in_order(parameters, argument, between=", ")


QUOTE, _GEMMA_END = '<|"|>', "<tool_call|>"
_GEMMA_TEXT = Arguments("", QUOTE, never=(_GEMMA_END,), quote=QUOTE)
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
_OF_ARRAYS = {"type", "items", "minItems", "maxItems"}
_ANY: Schema = {"type": ["string", "number", "boolean", "null", "array", "object"]}
# A model that must write a list may find no end.
_MOST_KEYS = 64
_COMMA = ' "," '


def _gemma_entries(rules: CallRules, schema: Schema) -> str:
    """The expression of an object's entries, sorted as templates of these models write them."""

    def entry(key: str, part: Schema) -> str:
        return f'{_gemma_key(rules, key)} ":" {_gemma_value(rules, part)}'

    return rules.in_order(sorted_by_name(schema), entry, between=",")


def _gemma_key(rules: CallRules, key: str) -> str:
    return literal(key) if re.fullmatch(r"\w+", key) else _gemma_constant(rules, key)


def _gemma_value(rules: CallRules, schema: Schema) -> str:
    fitting = schema if schema.keys() - DEFINITIONS else {**schema, **_ANY}
    return f"({' | '.join(_gemma_single(rules, single) for single in single_types(fitting))})"


def _gemma_single(rules: CallRules, schema: Schema) -> str:
    kind = schema["type"]
    if kind == "string":
        return _GEMMA_TEXT.text(rules, schema)
    if "enum" in schema:
        return f"({' | '.join(_gemma_constant(rules, value) for value in schema['enum'])})"
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
        items = (_gemma_constant(rules, item) for item in value)
        return f'"[" {_COMMA.join(items)} "]"'
    if isinstance(value, Mapping):
        entries = (
            f'{_gemma_key(rules, key)} ":" {_gemma_constant(rules, item)}'
            for key, item in value.items()
        )
        return f'"{{" {_COMMA.join(entries)} "}}"'
    return literal(json.dumps(value))


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


def _glm(prefix: str) -> CallForm:
    key, argument = f"{prefix}arg_key", f"{prefix}arg_value"
    begin = f"<{key}>{{}}</{key}>\n<{argument}>"
    return CallForm("{}\n", Arguments(begin, f"</{argument}>", glm_syntax, trims=True), "\n")


_JSON_CALL = CallForm('{{"name": {}, "arguments": ', end="}", written=json.dumps)
_LISTED: dict[str, Any] = {"before": '"["', "between": ", ", "after": '"]"'}
_INVOKED: dict[str, Any] = {"before": '"\\n"', "between": ""}
_FORMS = {
    "json_tools": _JSON_CALL._replace(before='"\\n"?', after='"\\n"?'),
    "mistral": _JSON_CALL._replace(**_LISTED),
    "kimi_k2": CallForm(
        "<|tool_call_begin|>functions.{}:#<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        between="",
        number="[0-9]{1,3}",
    ),
    "pythonic": CallForm("{}(", _python, ")", **_LISTED),
    "glm47": _glm(""),
    "laguna": _glm(""),
    # mlx-lm's parser knows a call without any parameter by its JSON alone.
    "longcat": _glm("longcat_")._replace(optional=_JSON_CALL),
    "qwen3_coder": CallForm(
        "\n<function={}>\n",
        Arguments("<parameter={}>\n", "</parameter>", qwen_syntax, before="\n", after="\n"),
        "</function>\n",
    ),
    "minimax_m2": CallForm(
        '<invoke name="{}">\n',
        Arguments(
            *('<parameter name="{}">', "</parameter>", minimax_syntax),
            never=("</invoke>",),
            after="\n",
            trims=True,
        ),
        "</invoke>\n",
        **_INVOKED,
    ),
    "minicpm5": CallForm(
        '"{}">',
        Arguments(
            *('<param name="{}">', "</param>", minimax_syntax),
            trims=True,
            wrapping=("<![CDATA[", "]]>"),
        ),
    ),
    "gemma4": CallForm("call:{}{{", _gemma_entries, "}", written=partial(plain, allowed=r"[\w-]+")),
    "function_gemma": CallForm(
        "call:{}{{",
        # The first brace ends the call, and the first comma a value without marks.
        Arguments(
            *("{}:", "<escape>", lambda schema: ValueSyntax(types=ALL_TYPES - {"object", "array"})),
            never=("}",),
            quote="<escape>",
            between=",",
        ),
        "}",
        written=partial(plain, allowed=r"\w+"),
    ),
    "kimi_k3": CallForm(
        '<|open|>call tool="{}" index="#"<|sep|>',
        Arguments(
            '<|open|>argument key="{0}" type="{1}"<|sep|>',
            "<|close|>argument<|sep|>",
            never=("<|close|>call<|sep|>", "<|close|>json<|sep|>"),
            written=_escaped,
        ),
        "<|close|>call<|sep|>",
        between="",
        around=_around_kimi_k3,
        written=_escaped,
        number="[1-9][0-9]?",
    ),
    "muse_spark": CallForm(
        '<atem:invoke name="{}">\n',
        Arguments(
            *('<atem:parameter name="{}">', "</atem:parameter>", muse_syntax),
            after="\n",
            trims=True,
        ),
        "</atem:invoke>\n",
        **_INVOKED,
        around=_around_muse,
    ),
}
