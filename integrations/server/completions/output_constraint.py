"""Says what the answer to a request must fit."""

from __future__ import annotations

import json
from typing import Any

from paged_kv.integrations.grammar import grammars
from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.integrations.grammar.grammars import Grammar
from paged_kv.integrations.server.http.api_errors import wrong_value
from paged_kv.integrations.server.http.output_format import (
    MOST_GRAMMAR_CHARACTERS,
    ResponseFormat,
    StructuredOutputs,
)
from paged_kv.integrations.server.http.schema import Body


def constraint_of(body: Body) -> Constraint | None:
    """What an answer to a request must fit; None for any text.

    Raises:
        APIError: 400, two fields say it, or the grammar is too long.
    """
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
