"""The schemas of the fields that say what an answer must fit: OpenAI's and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

# Large schemas of tools have tens of thousands of characters.
MOST_GRAMMAR_CHARACTERS = 1 << 18
MOST_ALTERNATIVES = 16_384

_STRICT = ConfigDict(strict=True, extra="forbid")
Text = Annotated[str, StringConstraints(min_length=1, max_length=MOST_GRAMMAR_CHARACTERS)]


class NamedSchema(BaseModel):
    """A JSON schema with a name, as OpenAI's clients send it. `name`, `description` and `strict`
    change nothing: every answer fits the schema."""

    model_config = _STRICT

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """OpenAI's field `response_format`."""

    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('"json_schema" is needed with the type "json_schema", and only then')
        return self


class NamedFunction(BaseModel):
    """The function of a `NamedTool`."""

    model_config = _STRICT

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]


class NamedTool(BaseModel):
    """The tool that an answer must call, in OpenAI's field `tool_choice`."""

    model_config = _STRICT

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class StructuredOutputs(BaseModel):
    """vLLM's field `structured_outputs`: one of these.

    Attributes:
        json_schema: a JSON schema, or its text; `json` in requests.
        json_object: true for any JSON object.
        regex: a regular expression that matches the whole answer.
        choice: the possible answers.
        grammar: a grammar in llguidance's Lark syntax, or in llama.cpp's GBNF.
    """

    model_config = _STRICT

    json_schema: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Annotated[
        list[Annotated[str, StringConstraints(max_length=MOST_GRAMMAR_CHARACTERS)]] | None,
        Field(min_length=1, max_length=MOST_ALTERNATIVES, fail_fast=True),
    ] = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(given := [name for name, value in self if value is not None]) != 1:
            raise ValueError(f"one of json, json_object, regex, choice, grammar is needed: {given}")
        return self
