"""Says what the answer to a request must fit."""

from __future__ import annotations

import json
from typing import Any

from paged_kv.integrations.grammar import grammars
from paged_kv.integrations.grammar.call_constraints import CallConstraint, Tool
from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.integrations.grammar.grammars import Grammar
from paged_kv.integrations.server.http.api_errors import shortened, wrong_value
from paged_kv.integrations.server.http.output_format import (
    MOST_GRAMMAR_CHARACTERS,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
)
from paged_kv.integrations.server.http.schema import Body, ChatBody


def constraint_of(body: Body) -> Constraint | CallConstraint | None:
    """What an answer to a request must fit; None for any text.

    Raises:
        APIError: 400, two fields say it, the grammar is too long, or a tool is to be called that
            there is not.
    """
    answer = _of_answer(body)
    return _of_calls(body, answer) if isinstance(body, ChatBody) else answer


def _of_calls(body: ChatBody, answer: Constraint | None) -> Constraint | CallConstraint | None:
    choice, tools = body.tool_choice or "auto", body.tools or []
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools:
        if named is not None or choice == "required":
            raise wrong_value("tool_choice: there are no tools to call: give some", "tool_choice")
        return answer
    known = [tool for each in tools if (tool := _tool(each)) is not None]
    called = tuple(tool for tool in known if named in (None, tool.name))
    if not called and named is not None:
        raise wrong_value(f"tool_choice: no tool is called {shortened(named)}", "tool_choice")
    if len(known) < len(tools) or not called:
        if choice != "auto":
            raise wrong_value("tools: each tool needs a function with a name", "tools")
        return answer
    several = body.parallel_tool_calls is not False and named is None
    choice = choice if isinstance(choice, str) else "required"
    return CallConstraint(called, choice, several, answer)


def _tool(said: dict[str, Any]) -> Tool | None:
    """A tool of a request; None for one without a function."""
    function = said.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        return None
    parameters = function.get("parameters") or {}
    return Tool(name, json.dumps(parameters)) if isinstance(parameters, dict) else None


def _of_answer(body: Body) -> Constraint | None:
    formatted = None if body.response_format is None else _of_format(body.response_format)
    outputs = body.structured_outputs
    structured = None if outputs is None else _of_outputs(outputs)
    if formatted and structured:
        raise wrong_value(
            "response_format and structured_outputs both say what the answer must fit: give one",
            "structured_outputs",
        )
    field = "response_format" if formatted else "structured_outputs"
    grammar = formatted or structured
    if grammar is None:
        return None
    if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
        raise wrong_value(
            f"{field} has {len(grammar.text):,} characters, and at most "
            f"{MOST_GRAMMAR_CHARACTERS:,} are possible",
            field,
        )
    return Constraint(grammar, field)


def _of_format(said: ResponseFormat) -> Grammar | None:
    if said.json_schema is not None:
        return grammars.json_schema(said.json_schema.json_schema)
    return grammars.json_object() if said.type == "json_object" else None


def _of_outputs(said: StructuredOutputs) -> Grammar:
    if said.regex is not None:
        return grammars.regex(said.regex)
    if said.choice is not None:
        return grammars.choice(said.choice)
    if said.grammar is not None:
        return grammars.lark(said.grammar)
    return grammars.json_object() if said.json_object else _schema(said.json_schema)


def _schema(said: Any) -> Grammar:
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise wrong_value(f"structured_outputs.json: no JSON: {error}", _JSON) from None
    if not isinstance(said, dict):
        raise wrong_value("structured_outputs.json: a schema is a JSON object", _JSON)
    return grammars.json_schema(said)


_JSON = "structured_outputs.json"
