"""Writes the rules of a grammar in llguidance's Lark syntax, for the calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_kv.integrations.grammar.equivalent_schemas import equivalent_schema
from paged_kv.integrations.grammar.text_patterns import ANY_TEXT, exactly

# Parameters one by one repeat the definitions that they refer to.
_MOST_CHARACTERS = 1 << 21


class CallRules:
    """Rules by name, each used by the ones after it.

    Args:
        tokenizer: mlx-lm's. A mark that it has a token for can only come as this token.

    Raises:
        ValueError: of every method that makes a rule: they are too large together.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self._tokens = {str(token): number for number, token in added if _is_mark(token)}
        self._rules: list[str] = []
        self._characters = 0
        self._known: dict[str, str] = {}

    def grammar(self, start: str) -> str:
        """The grammar of a text that fits an expression of these rules."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def rule(self, expression: str) -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._append(name, expression)
        return name

    def shared_rule(self, key: str, expression: Callable[[], str]) -> str:
        """The name of the rule with this key, which may use itself.

        Args:
            key: of the rule.
            expression: makes it, if it is new.
        """
        if key not in self._known:
            self._known[key] = f"shared_{len(self._known)}"
            self._append(self._known[key], expression())
        return self._known[key]

    def json(self, schema: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> str:
        """A rule for JSON that fits a schema. Only spaces as of Python's `json.dumps` are
        possible, which all templates show."""
        spaced = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        guided = {**equivalent_schema(schema), "x-guidance": {**spaced, **(options or {})}}
        return self.rule(f"%json {json.dumps(guided)}")

    def mark(self, text: str) -> str:
        """The expression for a mark of the template."""
        return " ".join(self._parts(text)) or '""'

    def text(
        self,
        patterns: Sequence[str],
        end: str,
        never: Sequence[str],
        refused: Sequence[str] = (),
        before: str = "",
    ) -> str:
        """A rule for a text without quotes, and the mark behind it.

        Args:
            patterns: regular expressions that match the whole text.
            end: the mark.
            never: what else must not come within the text.
            refused: regular expressions that must not match the whole text.
            before: a text before the mark.
        """
        first, *rest = self._parts(end)
        ends_text = first.startswith('"')  # nothing but the mark's letters says where it ends
        unfit = [f"({each}){exactly(before)}" for each in refused]
        if ends_text:
            unfit = [f"{each}{exactly(end)}" for each in unfit]
        behind = r"(.|\n)+" if ends_text else ANY_TEXT
        unfit += [f"{ANY_TEXT}{exactly(end)}{behind}"]
        if never:
            unfit += [f"{ANY_TEXT}({'|'.join(map(exactly, never))}){ANY_TEXT}"]
        matched = " & ".join(f"/{each}/" for each in patterns or [ANY_TEXT])
        closing = literal(before + end if ends_text else before)
        terminal = f"TEXT_{len(self._rules)}"
        self._append(terminal, f"(({matched}) {closing}) & ~/{'|'.join(unfit)}/")
        return self.rule(" ".join([terminal, *(rest if ends_text else [first, *rest])]))

    def _append(self, name: str, expression: str) -> None:
        self._characters += len(expression)
        if self._characters > _MOST_CHARACTERS:
            raise ValueError("the schemas of the tools are too large for a grammar")
        self._rules.append(f"{name}: {expression}")

    def _parts(self, text: str) -> list[str]:
        """A mark, divided into tokens of their own and other texts."""
        own = sorted((each for each in self._tokens if each in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, own))})", text) if own else [text]
        return [
            f"<[{self._tokens[part]}]>" if part in self._tokens else literal(part)
            for part in parts
            if part
        ]


def _is_mark(token: Any) -> bool:
    """Whether llguidance takes an added token for no text."""
    return bool(token.special) or re.fullmatch("<.*>", str(token)) is not None


def literal(text: str) -> str:
    """The expression for a text."""
    return json.dumps(text, ensure_ascii=False)
