"""Writes the rules of a grammar in llguidance's Lark syntax, for the calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Of a parameter whose text has no quotes: what a grammar can say of it.
_KNOWN_OF_TEXTS = {"type", "enum", "const", "maxLength", "$defs", "definitions"}
_NOTES = {"description", "title", "default", "examples", "$comment", "deprecated"}


class CallRules:
    """Rules by name, each used by the ones after it.

    Args:
        tokenizer: mlx-lm's. A mark that it has a token for can only come as this token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        """The grammar of a text that fits an expression of these rules."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def rule(self, expression: str, attribute: str = "") -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> str:
        """A rule for JSON that fits a schema. Only spaces as of Python's `json.dumps` are
        possible, which all templates show."""
        spaced = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        guided = {**schema, "x-guidance": {**spaced, **(options or {})}}
        return self.rule(f"%json {json.dumps(guided)}")

    def mark(self, text: str) -> str:
        """The expression for a mark of the template."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        is_token = len(tokens) == 1 and tokens[0] in added
        return f"<[{tokens[0]}]>" if is_token else literal(text)

    def text_until(self, end: str, schema: Mapping[str, Any]) -> str:
        """A rule for a text without quotes that fits a schema, and the mark behind it.

        Raises:
            ValueError: a grammar cannot say what the schema does.
        """
        if unknown := schema.keys() - _KNOWN_OF_TEXTS - _NOTES:
            raise ValueError(f"texts without quotes cannot fit {', '.join(sorted(unknown))}")
        mark = self.mark(end)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            if any(not isinstance(each, str) or end in each for each in values):
                raise ValueError("a value is no text")
            return self.rule(f"({' | '.join(map(literal, values))}) {mark}")
        text = f"/(.|\\n){{0,{schema.get('maxLength', '')}}}/"
        if mark.startswith('"'):
            return self.rule(f"{text} {mark}", "[lazy]")
        return self.rule(f"{text} {mark}")


def literal(text: str) -> str:
    """The expression for a text."""
    return json.dumps(text, ensure_ascii=False)
