"""What a model's answer must fit: where in it a grammar holds, all of it but the thinking or only
some parts; and which tools it may, or must, call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from paged_kv.integrations.grammar.call_forms import CallForm, form_of
from paged_kv.integrations.grammar.call_rules import CallRules, literal
from paged_kv.integrations.grammar.grammars import Grammar, lark

# A model that must call tools may find no end.
MOST_CALLS = 32
# What clients write into schemas has any type, and may be nested too deeply.
_WRONG = (ValueError, RecursionError, AttributeError, TypeError, KeyError)
_NO_SCHEMA = "the schema of a tool is wrong, or nested too deeply"

_NO_PARAMETERS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}


class Constraint(NamedTuple):
    """A grammar of an answer."""

    grammar: Grammar  # of the answer, or of what follows `after`
    field: str  # the field of a request that asked for it
    # The text after which the grammar begins, each time that it comes; None for an answer that the
    # grammar describes as a whole, behind the model's thinking.
    after: str | None = None
    repeats: bool = False  # whether other text may follow what the grammar describes
    is_optional: bool = False  # whether any text will do if the grammar does not compile
    # Whether the grammar describes the marks too that a model writes into answers
    has_marks: bool = False

    def place(self, tokenizer: Any, initial_state: str) -> dict[str, Any]:
        """The options of `FollowedGrammar` for an answer.

        Args:
            tokenizer: mlx-lm's.
            initial_state: "reasoning" if the prompt's end lets the model think; else "normal".

        Raises:
            ValueError: the model's answers have a form of their own.
        """
        if self.after is not None:
            return {"after": self.after, "repeats": self.repeats}
        if _writes_marks(tokenizer) and not self.has_marks:
            raise ValueError("this model writes marks into its answers that no grammar describes")
        if initial_state == "reasoning":
            return {"after": tokenizer.think_end, "is_required": True}
        openings: Any = tokenizer.think_start_tokens or ()
        if len(openings) != 1:
            return {}
        return {"after": tokenizer.think_end, "opening": openings[0], "is_required": True}


class CallableTool(NamedTuple):
    """A function that a model may call."""

    name: str  # of the function
    parameters: str  # JSON of a schema


class CallConstraint(NamedTuple):
    """Which tools an answer calls, in the form of whatever model answers."""

    tools: tuple[CallableTool, ...]  # that may be called
    # "auto": calls fit the schemas of their tools; "required": the answer is nothing but calls;
    # "none": no call.
    choice: str
    several: bool = True  # whether there may be more than one call
    # What the answer must fit if it calls no tool; None for any text
    answer: Constraint | None = None

    @property
    def field(self) -> str:
        """The field of a request that asked for it."""
        return "tools" if self.choice == "auto" else "tool_choice"

    def for_model(self, tokenizer: Any) -> Constraint | None:
        """What this means for a model of this tokenizer of mlx-lm; None for any text.

        Raises:
            ValueError: no grammar describes such calls of this model.
        """
        if self.choice == "none":
            return self.answer or self._without_calls(tokenizer)
        try:
            return self._with_calls(tokenizer)
        except _WRONG as error:
            if self.choice != "auto":
                reason = str(error) if isinstance(error, ValueError) else _NO_SCHEMA
                raise ValueError(reason) from None
            return self.answer

    def _without_calls(self, tokenizer: Any) -> Constraint | None:
        if not tokenizer.has_tool_calling:
            return None
        start = re.escape(tokenizer.tool_call_start).replace("/", r"\/")
        text = rf"/(.|\n)*/ & ~/(.|\n)*{start}(.|\n)*/"
        return Constraint(lark(f"start: TEXT\nTEXT: {text}\n"), self.field)

    def _with_calls(self, tokenizer: Any) -> Constraint:
        if (form := form_of(tokenizer)) is None:
            raise ValueError("no grammar describes calls in the form of this model's template")
        rules = CallRules(tokenizer)
        section = rules.rule(self._section(rules, tokenizer, form))
        start = tokenizer.tool_call_start
        if self.choice == "auto" and self.answer is None:
            grammar = lark(rules.grammar(section))
            return Constraint(grammar, self.field, start, self.several, is_optional=True)
        calls = f"{rules.mark(start)} {section}"
        if self.several and form.between is None:
            between = '"\\n"?' if tokenizer.tool_call_end else ""
            calls = f"{calls} ({between} {calls}){{0,{MOST_CALLS - 1}}}"
        if self.answer is not None and self.choice == "auto":
            kind, text = self.answer.grammar
            if kind != "json_schema":
                raise ValueError("with tools an answer can be text or JSON, not of another grammar")
            calls = f"{calls} | {rules.json(json.loads(text))}"
            return Constraint(lark(rules.grammar(calls)), self.field)
        if form.around is None or not _writes_marks(tokenizer):
            return Constraint(lark(rules.grammar(calls)), self.field)
        before, after = form.around(rules)
        grammar = lark(rules.grammar(f"{before} {calls} {after}"))
        return Constraint(grammar, self.field, has_marks=True)

    def _section(self, rules: CallRules, tokenizer: Any, form: CallForm) -> str:
        """The calls within one pair of marks, and the mark behind them."""
        schemas = {tool: _schema(tool) for tool in self.tools}  # which live while rules are written
        calls = [form.call(rules, tool.name, schema) for tool, schema in schemas.items()]
        call = rules.rule(" | ".join(calls))
        more = ""
        if self.several and form.between is not None:
            more = f"({literal(form.between)} {call}){{0,{MOST_CALLS - 1}}}"
        end = rules.mark(tokenizer.tool_call_end)
        return f"{form.before} {call} {more} {form.after} {end}"


def _schema(tool: CallableTool) -> Mapping[str, Any]:
    parameters = json.loads(tool.parameters) or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise ValueError(f"the parameters of {tool.name} are no object")
    return {**parameters, "type": "object"}


def _writes_marks(tokenizer: Any) -> bool:
    """Whether a model's answers have marks besides those of thinking and of calls."""
    return bool(tokenizer.structural_markers or tokenizer.response_transitions)
