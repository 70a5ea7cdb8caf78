"""Calls of tools fit the tools' schemas, whatever the model would say."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from mlx_lm.tool_parsers import json_tools
from openai import BadRequestError

from tests.support.agent_model import Script, agent_folder
from tests.support.running_server import PagedRunningServer, paged_server

SAYS = "{% for message in messages %}{{ message.content }}{% endfor %}"
HOURS = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6, "description": "of the weather"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "at": {"type": "object", "properties": {"hours": HOURS}, "required": ["hours"]},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
}
WEATHER["properties"]["at"]["additionalProperties"] = False
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "stop": {"type": "object", "maxProperties": 0}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FITS = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "get_weather", "arguments": {"city": 5}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(
    script: Script, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PagedRunningServer]:
    model = agent_folder(tmp_path_factory.mktemp("models"))
    with paged_server("--model", model, "--max-kv-bytes", "64MB") as started:
        yield started


@pytest.fixture(scope="module")
def without_tools(tiny: str) -> Iterator[PagedRunningServer]:
    """A model whose template has no form of calls, and whose server answers without tools."""
    options = ["--max-kv-bytes", "64MB", "--chat-template", SAYS, "--drop-tools"]
    with paged_server("--model", tiny, *options) as started:
        yield started


def ask(running: PagedRunningServer, **body: Any) -> Any:
    create: Any = running.client().chat.completions.create
    messages = [{"role": "user", "content": "import os\n"}]
    asked = {"messages": messages, "tools": TOOLS, "max_tokens": 1500, "temperature": 0, **body}
    return create(model="default_model", **asked)


def calls_of(choice: Any) -> list[str]:
    """The names of the called tools, whose arguments fit."""
    assert choice.finish_reason == "tool_calls", choice
    for call in choice.message.tool_calls:
        validator = Draft202012Validator(SCHEMAS[call.function.name])
        assert validator.is_valid(json.loads(call.function.arguments)), call
    return [call.function.name for call in choice.message.tool_calls]


@pytest.mark.parametrize(
    ("said", "body", "called"),
    [
        pytest.param(
            *("Hello.", {"tool_choice": "required", "parallel_tool_calls": False}, None),
            marks=pytest.mark.slow,
        ),
        (f"{FITS}\n{FITS}", {"tool_choice": "required"}, ["stop"] * 2),
        (f"{FITS}\n{FITS}", {"tool_choice": "required", "parallel_tool_calls": False}, ["stop"]),
        (f"{FITS}\n{FITS}", {"parallel_tool_calls": False}, ["stop"]),
        (f"{FITS}\n{FITS}", {"tool_choice": NAMED}, ["get_weather"]),
        (WRONG, {}, ["get_weather"]),
    ],
)
@pytest.mark.slow
def test_calls_fit_their_tools(
    said: str,
    body: dict[str, Any],
    called: list[str] | None,
    running: PagedRunningServer,
    script: Script,
) -> None:
    script.says(said)
    (choice,) = ask(running, **body).choices
    assert not (choice.message.content or "").strip()
    assert len(calls_of(choice)) == 1 if called is None else calls_of(choice) == called


def test_without_calls_their_mark_does_not_come(
    tiny: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content would not have the mark of a call that nobody understands. Some models have no
    token for it."""
    monkeypatch.setattr(json_tools, "tool_call_start", "abc")
    template = SAYS + "{% if false %}<tool_call>{{ tool_call.name }}{% endif %}"
    with paged_server("--model", tiny, "--max-kv-bytes", "64MB", "--chat-template", template) as it:
        script.says("x abc y abc z abc. " * 4)
        (choice,) = ask(it, tool_choice="none", logprobs=True, max_tokens=12).choices
    assert not choice.message.tool_calls
    told = "".join(token.token for token in choice.logprobs.content)
    assert told.startswith("x ")
    assert "abc" not in told


@pytest.mark.slow
def test_tools_that_no_grammar_describes_are_offered_all_the_same(
    running: PagedRunningServer, without_tools: PagedRunningServer, script: Script
) -> None:
    for choice in ("auto", "none"):
        assert ask(without_tools, tool_choice=choice, max_tokens=4).choices
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    assert ask(running, tools=odd, max_tokens=4).choices
    with pytest.raises(BadRequestError):
        ask(running, tools=odd, max_tokens=4, tool_choice="required")
