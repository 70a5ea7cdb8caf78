"""Calls of tools fit the tools' schemas, in the form of each template that mlx-lm parses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from mlx_lm.tool_parsers import json_tools
from openai import BadRequestError

from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import PagedRunningServer, in_float32, paged_server

LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "64MB"]
SAYS = "{% for message in messages %}{{ message.content }}{% endfor %}"
# What mlx-lm knows each form by, in a template.
MARKS = {
    "json_tools": "<tool_call>{{ tool_call.name }}",
    "mistral": "[TOOL_CALLS]",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "pythonic": "<|tool_call_start|>",
    "glm47": "<arg_key>",
    "longcat": "<longcat_tool_call>",
    "qwen3_coder": "<tool_call>\n<function=",
    "minimax_m2": "<minimax:tool_call>",
    "minicpm5": '<function name="f"><param name="p">',
    "gemma4": "<|tool_call><tool_call|>",
    "muse_spark": "<atem:function_calls>",
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6, "description": "of the weather"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "at": {
            "type": "object",
            "properties": {"hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            "required": ["hours"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "at"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS: dict[str, Any] = {
    "get_weather": WEATHER,
    "stop": {"type": "object", "maxProperties": 0},
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
# The end of a text becomes likely wherever it may come: else the small model calls tools for ever.
HOT: dict[str, Any] = {"temperature": 2, "max_tokens": 1500, "logit_bias": {"0": 10}}


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


def template(form: str) -> list[str]:
    return ["--chat-template", SAYS + "{% if false %}" + MARKS[form] + "{% endif %}"]


def ask(running: PagedRunningServer, text: str = "import os\n", **body: Any) -> Any:
    create: Any = running.client().chat.completions.create
    messages = [{"role": "user", "content": text}]
    return create(model="default_model", messages=messages, **{"tools": TOOLS, **HOT, **body})


def assert_calls_fit(choice: Any) -> list[str]:
    """Returns the names of the called tools."""
    assert choice.finish_reason == "tool_calls", choice
    assert not (choice.message.content or "").strip()
    for call in choice.message.tool_calls:
        validator = Draft202012Validator(SCHEMAS[call.function.name])
        assert validator.is_valid(json.loads(call.function.arguments)), call
    return [call.function.name for call in choice.message.tool_calls]


@pytest.mark.parametrize(
    "form", ["json_tools", *[pytest.param(form, marks=pytest.mark.slow) for form in [*MARKS][1:]]]
)
def test_required_calls_fit_their_tools(form: str) -> None:
    with paged_server(*LLAMA, *template(form)) as running:
        answer = ask(running, tool_choice="required", n=3, seed=1, max_tokens=6000)
        for choice in answer.choices:
            assert_calls_fit(choice)
        answer = ask(running, tool_choice=NAMED, n=3, seed=2)
        assert [assert_calls_fit(choice) for choice in answer.choices] == [["get_weather"]] * 3
        answer = ask(running, tool_choice="required", parallel_tool_calls=False, n=4, seed=3)
        assert {len(assert_calls_fit(choice)) for choice in answer.choices} == {1}


@pytest.fixture
def calls_begin_with_def(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model knows no mark of tools, but begins a function soon."""
    monkeypatch.setattr(json_tools, "tool_call_start", "def")


@pytest.mark.slow
@pytest.mark.usefixtures("calls_begin_with_def")
def test_a_call_fits_once_the_model_begins_it() -> None:
    free: dict[str, Any] = {
        "temperature": 1,
        "n": 4,
        "seed": 1,
        "max_tokens": 400,
        "logit_bias": {},
    }
    text = "class A:\n    def f(self):\n        pass\n\n    "
    with paged_server(*LLAMA, *template("json_tools")) as running:
        choices = ask(running, text, **free).choices
        calls = [call for each in choices for call in each.message.tool_calls or []]
        assert calls
        for call in calls:
            schema = SCHEMAS[call.function.name]
            assert Draft202012Validator(schema).is_valid(json.loads(call.function.arguments))
        single = ask(running, text, **free, parallel_tool_calls=False).choices
        assert {len(each.message.tool_calls or []) for each in single} <= {0, 1}
        for each in ask(running, text, **free, tool_choice="none", logprobs=True).choices:
            assert not each.message.tool_calls
            # The content would not have the mark of a call that nobody understands.
            assert "def" not in "".join(token.token for token in each.logprobs.content)


def test_a_stream_has_the_call() -> None:
    with paged_server(*LLAMA, *template("qwen3_coder")) as running:
        parts = list(ask(running, tool_choice=NAMED, stream=True))
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
    (arguments,) = [json.loads(call.function.arguments) for call in calls]
    assert Draft202012Validator(WEATHER).is_valid(arguments)


def test_an_answer_is_json_or_calls() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
    response = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with paged_server(*LLAMA, *template("json_tools")) as running:
        choices = ask(running, response_format=response, n=12, seed=5).choices
        for choice in choices:
            if choice.message.tool_calls:
                assert_calls_fit(choice)
            else:
                assert Draft202012Validator(schema).is_valid(json.loads(choice.message.content))
        assert {bool(choice.message.tool_calls) for choice in choices} == {True, False}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice", "no tools"),
        ({"tool_choice": "must"}, "tool_choice", "must"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "fly",
        ),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools", "name"),
        ({"tool_choice": "required"}, "tool_choice", "template"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ],
)
def test_what_a_template_cannot_do_is_refused(
    body: dict[str, Any], param: str, said: str, without_tools: PagedRunningServer
) -> None:
    with pytest.raises(BadRequestError, match=said) as refused:
        ask(without_tools, extra_body={"tools": TOOLS} | body)
    assert (refused.value.param or "").startswith(param)


@pytest.fixture(scope="module")
def without_tools() -> Iterator[PagedRunningServer]:
    """A model whose template has no form of calls, and whose server answers without tools."""
    with paged_server(*LLAMA, "--chat-template", SAYS, "--drop-tools") as running:
        yield running


def test_tools_that_no_grammar_describes_are_offered_all_the_same(
    without_tools: PagedRunningServer,
) -> None:
    for choice in ("auto", "none"):
        assert ask(without_tools, tool_choice=choice, max_tokens=4).choices
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    with paged_server(*LLAMA, *template("json_tools")) as running:
        assert ask(running, tools=odd, max_tokens=4).choices
        with pytest.raises(BadRequestError, match="not"):
            ask(running, tools=odd, max_tokens=4, tool_choice="required")
