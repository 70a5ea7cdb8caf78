"""Whatever text a grammar of calls allows, mlx-lm's parser reads calls from it that fit."""

import importlib
import json
import re
from contextlib import suppress
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AddedToken, AutoTokenizer

from benches.generated_schemas import generated_schema
from paged_kv.integrations.grammar.call_rules import found_within
from paged_kv.integrations.grammar.constraints import CallableTool, CallConstraint
from paged_kv.integrations.grammar.grammars import GrammarError
from paged_kv.integrations.grammar.vocabulary import Vocabulary
from tests.support.folders import MODEL_FOLDERS
from tests.support.grammar_walks import walked_text

# The tokens of their own that models of each form have.
TOKENS = {
    "json_tools": ["<tool_call>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "pythonic": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "glm47": [
        *("<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
    "longcat": ["<longcat_tool_call>", "</longcat_tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "minicpm5": [],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "function_gemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "muse_spark": ["<|start|>", "<|message|>", "<|eom|>"],
}  # fmt: skip
# Of the cases that CI takes: the form, whether it has tokens of its own, and whether values are
# texts. The soak takes the others.
IN_CI = [("glm47", True, True), ("muse_spark", False, False)]
FORMATS = FormatChecker(["ipv4", "uuid", "email"])
# What parsers take for something else than text.
TRAPS = [
    *("null", "NULL", " none ", "true", "True", "no", "12", "-1.5e3", "1_0", "inf", "nan", "007"),
    *("'a'", "b'a'", '"', '"a"', "[1]", '{"a": 1}', "(1,)", "set()", "#\n1", "\\\n1", "1, 2"),
    *(" ", "\n", "\t", "}", "{", ",x:", ":", "\x00", "\x000\x00", "\ufeff1", "é", "<", "&"),
    *("2024-02-29", "a@b.c", "red-1", "abc"),
]  # fmt: skip
MARKS = [
    *("</arg_value>", "</longcat_arg_value>", "</parameter>", "\n</parameter>\n", "</param>"),
    *("</function>", "</function>\n", "</tool_call>", "</longcat_tool_call>", "</invoke>\n"),
    *("</minimax:tool_call>", "<![CDATA[", "]]>", "]]></param>", '<|"|>', "<tool_call|>"),
    *("<escape>", "<end_function_call>", "<|close|>argument<|sep|>", "<|close|>call<|sep|>"),
    *("<|close|>tools<|sep|>", "<|open|>json<|sep|>{}<|close|>json<|sep|>", "<|eom|>", "</atem:"),
    *("</atem:parameter>\n", "</atem:invoke>\n", "</atem:function_calls>", "<|tool_call_end|>"),
]
# Forms that write JSON: a text within it may spell the mark that ends a call.
OF_JSON = {"json_tools", "mistral", "kimi_k2", "pythonic"}
INNER = ["</arg_", "}", "]", "}]", "\\n", ":", ", ", '", "']


@cache
def of_form(form: str, with_tokens: bool) -> TokenizerWrapper:
    """A tokenizer of a model with this form."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDERS["stdlib-llama"])
    needed = with_tokens or form == "kimi_k3"
    tokenizer.add_tokens([AddedToken(each, special=True) for each in TOKENS[form] if needed])
    module = importlib.import_module(f"mlx_lm.tool_parsers.{form}")
    return TokenizerWrapper(
        tokenizer,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_parser=module.parse_tool_call,
        response_format=RESPONSE_FORMAT if form == "muse_spark" else None,
    )


def parsed_calls(tokenizer: Any, text: str, tools: list[Any]) -> list[Any]:
    """The calls that mlx-lm's server reads from an answer."""
    start = tokenizer.response_initial_state or "normal"
    state = make_text_state_machine(tokenizer).make_state(start)
    state, segments = TextStateMachine.split(state, text)
    texts, inside = [""], False
    for name, part in segments:
        if inside and name != "tool":
            texts.append("")
        inside = name == "tool"
        texts[-1] += part if inside else ""
        assert name != "normal" or not part.strip(), (text, part)
    calls = []
    for each in texts:
        if each:
            found = tokenizer.tool_parser(each, tools)
            calls += found if isinstance(found, list) else [found]
    return calls


def parameters(random: Random, form: str, is_text: bool) -> dict[str, Any]:
    """The schema of a tool's parameters."""
    odd = [] if form == "pythonic" else ["a-b"]
    names = random.sample(["city", "Days", "x_1", "unit", *odd], random.randint(1, 3))
    make = text_schema if is_text else any_schema
    least = 1.0 if form == "longcat" else 0.7
    return {
        "type": "object",
        "properties": {name: make(random) for name in names},
        "required": [name for name in names if random.random() < least],
        "additionalProperties": False,
    }


def text_schema(random: Random) -> dict[str, Any]:
    text: dict[str, Any] = random.choice([
        {"type": "string"},
        {"type": "string", "minLength": 2, "maxLength": 9},
        {"type": "string", "pattern": random.choice(["^[a-z]+-[0-9]$", "[0-9]{2}", "^(a|null)$"])},
        {"type": "string", "format": random.choice(["date", "ipv4", "uuid", "email", "time"])},
        {"enum": random.sample(["red", "blue", "a b", "x-1"], 2)},
    ])  # fmt: skip
    other: Any = random.choice([
        {"type": "null"},
        {"type": "integer", "minimum": 3},
        {"type": "boolean"},
        {"const": 2.5},
    ])  # fmt: skip
    kind = random.randrange(4)
    if kind == 0:
        return {"anyOf": [text, other]}
    if kind == 1:
        return {"type": random.sample(["string", "integer", "null", "boolean"], 2)}
    return text


def any_schema(random: Random) -> dict[str, Any]:
    return generated_schema(random, 2) if random.random() < 0.7 else text_schema(random)


def walk(form: str, with_tokens: bool, is_text: bool, rounds: int) -> tuple[int, int]:
    """How many pairs of tools the form takes, and how many texts ended and fitted."""
    tokenizer, random = of_form(form, with_tokens), Random(1)
    vocabulary, taken, ended = Vocabulary(tokenizer), 0, 0
    snippets = [*TRAPS, *(MARKS if is_text and form not in OF_JSON else INNER)]
    for _ in range(rounds):
        schemas = {name: parameters(random, form, is_text) for name in ("first", "se_cond")}
        tools = [{"type": "function", "function": {"name": name, "parameters": each}}
                 for name, each in schemas.items()]  # fmt: skip
        asked = [CallableTool(name, json.dumps(each)) for name, each in schemas.items()]
        several = random.random() < 0.5
        try:
            constraint = CallConstraint(tuple(asked), "required", several).for_model(tokenizer)
            assert constraint is not None
            compiled = vocabulary.compiled(constraint.grammar)
        except GrammarError:
            raise
        except ValueError:
            continue  # the form cannot write such parameters
        taken += 1
        for _ in range(4):
            text = walked_text(compiled, random, snippets)
            if text is None:
                continue
            ended += 1
            calls = parsed_calls(tokenizer, text, tools)
            assert calls if several else len(calls) == 1, (schemas, text)
            for call in calls:
                validator = Draft202012Validator(schemas[call["name"]], format_checker=FORMATS)
                assert validator.is_valid(call["arguments"]), (schemas[call["name"]], text, call)
    return taken, ended


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in IN_CI else pytest.mark.soak)
        for case in product(TOKENS, (True, False), (True, False))
    ],
)
def test_calls_that_a_grammar_allows_are_parsed_and_fit(
    case: tuple[str, bool, bool],
) -> None:
    if case[0] == "function_gemma" and not case[-1]:
        pytest.skip("it has neither lists nor objects")
    taken, ended = walk(*case, 3 if case in IN_CI else 6)
    assert taken
    assert ended > taken


def test_patterns_are_searched_for() -> None:
    for pattern in ("^ab$", "b", "^a|b$", "a[|)]b|c", "^(a|b)+/", r"\d\w$", r"a\$"):
        for text in ("", "ab", "b", "a|b", "xab", "abx", "a)b", "ab/c", "1a", "1é", "a$", "a", "c"):
            assert bool(re.fullmatch(found_within(pattern), text)) == bool(
                re.search(pattern, text, re.ASCII)
            )


@pytest.mark.parametrize(
    ("form", "schema", "said"),
    [
        ("qwen3_coder", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "reads no integer"),
        ("minimax_m2", {"$ref": "#/$defs/count"}, "reads no integer"),
        ("function_gemma", {"type": "array"}, "no array"),
        ("gemma4", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("glm47", {"type": "string", "format": "odd"}, "odd"),
        ("glm47", {"type": "string", "pattern": "[a&&b]"}, "not clear"),
        ("kimi_k3", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ("kimi_k3", {"description": "anything"}, "no type"),
        ("minicpm5", {"enum": ["null"], "type": "string"}, "null"),
        ("glm47", {"enum": ["a</arg_value>", None]}, "a</arg_value>"),
        ("gemma4", False, "no type"),
    ],
)
def test_what_a_form_cannot_write_is_named(form: str, schema: Any, said: str) -> None:
    asked = {
        "type": "object",
        "properties": {"size": schema},
        "$defs": {"count": {"type": "integer"}},
    }
    constraint = CallConstraint((CallableTool("f", json.dumps(asked)),), "required")
    with pytest.raises(ValueError, match=f"the parameter size: .*{said}"):
        constraint.for_model(of_form(form, with_tokens=True))


@pytest.mark.parametrize("wrong", [5, "a", [1], {"a": 5}, None, True, -1.5, [None]])
@pytest.mark.parametrize("form", ["qwen3_coder", "gemma4", "kimi_k3", "function_gemma"])
def test_schemas_with_wrong_types_are_refused_or_do_not_compile(form: str, wrong: Any) -> None:
    tokenizer = of_form(form, with_tokens=True)
    for key in ("properties", "required", "$defs", "type"):
        _refused_or_written(tokenizer, {"properties": {"a": {"type": "string"}}, key: wrong})
    keys = ("type", "enum", "anyOf", "oneOf", "allOf", "$ref", "pattern", "format", "minLength")
    for key in (*keys, "items", "properties", "required", "maxItems", "additionalProperties"):
        for kind in ("string", "object", "array"):
            _refused_or_written(tokenizer, {"properties": {"a": {"type": kind, key: wrong}}})


def _refused_or_written(tokenizer: Any, schema: dict[str, Any]) -> None:
    with suppress(ValueError):
        CallConstraint((CallableTool("f", json.dumps(schema)),), "required").for_model(tokenizer)


def test_a_union_has_the_texts_that_the_parser_reads_as_texts() -> None:
    """Optional texts, which many tools have, may be written as models write them."""
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    either = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 7}]}
    for form, schema, texts in [
        ("qwen3_coder", optional, ["big", "12", "2024-01-01", "null"]),
        ("minimax_m2", optional, ["big", "12", "2024-01-01", "null"]),
        ("minimax_m2", either, ["big", "12"]),
        ("glm47", optional, ["big", '"12"', '"2024-01-01"', "null"]),
        ("glm47", either, ["big", '"12"', "12"]),
        ("muse_spark", optional, ["big", '"12"', "2024-01-01", "null"]),
        ("muse_spark", either, ["big", '"12"', "12"]),
    ]:
        asked = {"type": "object", "properties": {"size": schema}, "required": ["size"]}
        tokenizer = of_form(form, with_tokens=False)
        constraint = CallConstraint((CallableTool("f", json.dumps(asked)),), "auto", False)
        written = constraint.for_model(tokenizer)
        assert written is not None
        compiled = Vocabulary(tokenizer).compiled(written.grammar)
        head, end = PLACES[form]
        for text in texts:
            matcher = compiled.begin().matcher
            tokens = compiled.tokens.tokenize_str(f"{head}{text}{end}")
            assert matcher.validate_tokens(tokens) == len(tokens), (form, text)


PLACES = {
    "qwen3_coder": ("\n<function=f>\n<parameter=size>\n", "\n</parameter>\n"),
    "minimax_m2": ('\n<invoke name="f">\n<parameter name="size">', "</parameter>\n"),
    "glm47": ("f\n<arg_key>size</arg_key>\n<arg_value>", "</arg_value>"),
    "muse_spark": ('\n<atem:invoke name="f">\n<atem:parameter name="size">', "</atem:parameter>\n"),
}
