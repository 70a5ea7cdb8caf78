"""Says what the answer to a request must fit, and compiles it with a limit of time and memory.

A new grammar is compiled in a process first, which the system ends in time; llguidance cannot be
stopped in a thread. What compiles there is compiled again for the model's tokenizer, on a thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from paged_kv.extras import extra_module
from paged_kv.integrations.grammar import grammars
from paged_kv.integrations.grammar.constraints import CallableTool, CallConstraint, Constraint
from paged_kv.integrations.grammar.grammars import Grammar, GrammarError, one_line
from paged_kv.integrations.grammar.vocabulary import CompiledGrammar
from paged_kv.server.completions.service import Service, run_python
from paged_kv.server.engine.jobs import Job
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.engine.sampling import model_constraint
from paged_kv.server.http.api_errors import APIError, shortened, wrong_value
from paged_kv.server.http.schema import (
    MOST_GRAMMAR_CHARACTERS,
    Body,
    ChatBody,
    NamedTool,
    StructuredOutputs,
)


def constraint_of(body: Body) -> Constraint | CallConstraint | None:
    """What an answer to a request must fit; None for any text. Raises APIError 400: two fields say
    it, the grammar is too long, or a tool is to be called that there is not."""
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


def _tool(tool: dict[str, Any]) -> CallableTool | None:
    """A tool of a request; None for one without a function."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        return None
    parameters = function.get("parameters") or {}
    return CallableTool(name, json.dumps(parameters)) if isinstance(parameters, dict) else None


def _of_answer(body: Body) -> Constraint | None:
    form, outputs = body.response_format, body.structured_outputs
    grammar, field = None, "response_format"
    if form is not None and form.json_schema is not None:
        grammar = grammars.json_schema(form.json_schema.json_schema)
    elif form is not None and form.type == "json_object":
        grammar = grammars.json_object()
    if outputs is not None:
        if grammar is not None:
            raise wrong_value(
                "response_format and structured_outputs both say what the answer must fit: give "
                "one",
                "structured_outputs",
            )
        grammar, field = _of_outputs(outputs), "structured_outputs"
    if grammar is None:
        return None
    if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
        raise wrong_value(
            f"{field} has {len(grammar.text):,} characters, and at most "
            f"{MOST_GRAMMAR_CHARACTERS:,} are possible",
            field,
        )
    return Constraint(grammar, field)


def _of_outputs(outputs: StructuredOutputs) -> Grammar:
    if outputs.regex is not None:
        return grammars.regex(outputs.regex)
    if outputs.choice is not None:
        return grammars.choice(outputs.choice)
    if outputs.grammar is not None:
        return grammars.lark(outputs.grammar)
    return grammars.json_object() if outputs.json_object else _schema(outputs.json_schema)


def _schema(schema: Any) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise wrong_value(f"structured_outputs.json: no JSON: {error}", _JSON) from None
    if not isinstance(schema, dict):
        raise wrong_value("structured_outputs.json: a schema is a JSON object", _JSON)
    return grammars.json_schema(schema)


_JSON = "structured_outputs.json"


log = logging.getLogger(__name__)

TIME_LIMIT_S = 5
MOST_BYTES = 1 << 30


async def prepare_grammars(
    service: Service, jobs: Sequence[Job], loaded: LoadedModel | None
) -> None:
    """Compile the grammars of a request's jobs for a model; None if it is not loaded yet. Raises
    APIError 400: a grammar does not compile, or not within the limits; or the extra `structured` is
    not installed."""
    requested, workers = jobs[0].constraint, service.workers  # all jobs of a request have the same
    work = partial(model_constraint, requested, loaded and loaded.tokenizer)
    # The grammar of many tools takes long to write.
    has_tools = isinstance(requested, CallConstraint)
    constraint = await workers.compile(work) if has_tools else work()
    compiled = None
    try:
        if constraint is not None:
            await _require_valid(service, constraint)
        if constraint is not None and loaded is not None:
            service.thread.announce(constraint)
            compiled = await workers.compile(partial(_compiled, loaded, constraint))
    except APIError as error:
        if constraint is None or not constraint.is_optional:
            raise
        log.warning("calls of tools may not fit their schemas: %s", error)
        constraint = None
    for job in jobs:
        job.constraint = requested if loaded is None else constraint
        job.compiled = compiled


async def _require_valid(service: Service, constraint: Constraint) -> None:
    """Raise APIError unless a grammar compiles in a process with limits."""
    grammar = constraint.grammar
    if service.valid_grammars.use(grammar):
        return
    try:
        extra_module("llguidance", "structured")
        async with service.workers.grammar_processes:
            limits, question = (str(TIME_LIMIT_S), str(MOST_BYTES)), json.dumps([*grammar]).encode()
            ended = await run_python(grammars.__file__, *limits, question=question)
        if ended.is_too_slow:
            raise ValueError(f"compiling it takes longer than {TIME_LIMIT_S} s: make it smaller")
        if ended.status < 0:
            raise ValueError(f"compiling it takes more than {MOST_BYTES:,} bytes: make it smaller")
        if ended.status:
            raise ValueError(one_line(ended.reason))
    except ValueError as error:
        raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
    service.valid_grammars[grammar] = True


def _compiled(loaded: LoadedModel, constraint: Constraint) -> CompiledGrammar:
    compiled = loaded.grammars.compiled(constraint)
    try:
        compiled.require_quick()
    except GrammarError as error:
        raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
    return compiled
