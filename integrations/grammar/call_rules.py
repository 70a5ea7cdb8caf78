"""Writes rules of calls in llguidance's syntax, and what schemas say of texts as its regular
expressions, which match a whole text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paged_kv.extras import extra_module
from paged_kv.integrations.grammar.schemas import (
    DEFINITIONS,
    NOTES,
    Schema,
    equivalent_schema,
    part_of,
)

# Parameters one by one repeat the definitions that they refer to.
_MOST_CHARACTERS = 1 << 21
# Keywords of a tool's parameters that parameters one by one can fit.
_KNOWN = {"type", "properties", "required", "additionalProperties"}

ANY_TEXT, SOME_TEXT = r"(.|\n)*", r"(.|\n)+"
# A parser drops spaces at the ends of such texts: with them a text could get too short.
_EDGE = r"[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200f\u2028-\u202f\u205f\u3000\ufeff]"
TRIMMED = rf"({_EDGE}({ANY_TEXT}{_EDGE})?)?"

_DATE = (
    r"[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20})?"
_WORDS = r"[A-Za-z0-9]+([.-][A-Za-z0-9]+)*"
# What these match has the format, not the other way round: llguidance takes long for more.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_WORDS}",
    "uri": (
        rf"[a-z][a-z0-9+.-]*:\/\/{_WORDS}(:[0-9]{{1,4}})?"
        r"(\/[A-Za-z0-9_.~-]*)*(\?[A-Za-z0-9_.~&=-]*)?"
    ),
}
# In a set of characters llguidance takes these for more than letters.
_SET_OPERATIONS = ("[", "&&", "--", "~~")


class CallRules:
    """Rules by name, each used by the ones after it.

    Args:
        tokenizer: mlx-lm's. A mark that it has a token for can only come as this token.

    Raises:
        ValueError: of every method that makes a rule: they are too large together.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Those that llguidance takes for no text.
        self._tokens = {
            str(token): number
            for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if token.special or re.fullmatch("<.*>", str(token))
        }
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
        """The name of the rule with this key, which may use itself. `expression` makes it."""
        if key not in self._known:
            self._known[key] = f"shared_{len(self._known)}"
            self._append(self._known[key], expression())
        return self._known[key]

    def json(self, schema: Schema, options: Mapping[str, Any] | None = None) -> str:
        """A rule for JSON that fits a schema. Only spaces as of Python's `json.dumps` are
        possible, which all templates show."""
        spaced = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        guided = {**equivalent_schema(schema), "x-guidance": {**spaced, **(options or {})}}
        return self.rule(f"%json {json.dumps(guided)}")

    def mark(self, text: str) -> str:
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
            never: what else must not come within the text; not empty.
            refused: regular expressions that must not match the whole text.
            before: a text before the mark.
        """
        first, *rest = self._parts(end)
        is_token = not first.startswith('"')  # else its letters alone say where the text ends
        closing = before if is_token else before + end
        unfit = [
            *(f"({pattern}){_exactly(closing)}" for pattern in refused),
            f"{ANY_TEXT}{_exactly(end)}{ANY_TEXT if is_token else SOME_TEXT}",
            f"{ANY_TEXT}({'|'.join(map(_exactly, never))}){ANY_TEXT}",
        ]
        matched = " & ".join(f"/{pattern}/" for pattern in patterns or [ANY_TEXT])
        terminal = f"TEXT_{len(self._rules)}"
        self._append(terminal, f"(({matched}) {literal(closing)}) & ~/{'|'.join(unfit)}/")
        return self.rule(" ".join([terminal, *([first, *rest] if is_token else rest)]))

    def in_order(
        self, parameters: Schema, value: Callable[[str, Schema], str], between: str = ""
    ) -> str:
        """The parameters of a call in the schema's order; those that are not required may be left
        out.

        Args:
            parameters: their schema.
            value: the expression of a parameter, from its name and its schema with the definitions
                that this refers to.
            between: the text between two parameters.

        Raises:
            ValueError: the schema says more than which parameters there are, or `value` raises it.
        """
        if unknown := parameters.keys() - _KNOWN - NOTES - DEFINITIONS:
            raise ValueError(f"parameters one by one cannot fit {', '.join(sorted(unknown))}")
        properties, required = parameters.get("properties", {}), set(parameters.get("required", ()))
        if not properties.keys() >= required:
            raise ValueError("a required parameter has no schema")
        # The rest after each parameter, whether one came before it or not.
        first, later = '""', '""'
        for key, schema in reversed(properties.items()):
            try:
                one = self.rule(value(key, part_of(parameters, schema)))
            except ValueError as error:
                raise ValueError(f"the parameter {key}: {error}") from None
            whole, joined = f"{one} {later}", f"{literal(between)} {one} {later}"
            if key in required:
                first, later = self.rule(whole), self.rule(joined)
            else:
                first, later = self.rule(f"{whole} | {first}"), self.rule(f"{joined} | {later}")
        return first

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


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _exactly(text: str) -> str:
    """What matches nothing but this text."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def text_patterns(schema: Schema) -> list[str]:
    """The regular expressions that a text must match that fits a schema, in llguidance's syntax.

    Raises:
        ValueError: llguidance's regular expressions cannot say it.
    """
    found = []
    if "minLength" in schema or "maxLength" in schema:
        bounds = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
        found.append(f"(.|\\n){{{bounds}}}")
    if "pattern" in schema:
        found.append(found_within(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ValueError(f"texts without quotes cannot have the format {schema['format']!r}")
        found.append(_FORMATS[schema["format"]])
    return found


def found_within(pattern: str) -> str:
    """What matches a whole text in which a regular expression of a JSON schema is found.

    Raises:
        ValueError: it is no text, llguidance would read a set of characters otherwise, or
            llguidance is not installed.
    """
    if not isinstance(pattern, str):
        raise ValueError("a pattern is a text")
    whole = []
    for part in _alternatives(pattern):
        begins, ends = part.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", part) is not None
        body = part[begins : len(part) - ends]
        whole.append(f"{'' if begins else ANY_TEXT}({body}){'' if ends else ANY_TEXT}")
    # Sets of characters are ASCII's, as ECMA's are.
    return str(extra_module("llguidance", "structured").regex_to_lark("|".join(whole), "dws"))


def _alternatives(pattern: str) -> Iterator[str]:
    depth, written = 0, ""
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        if len(part) > 2 and any(operation in part[1:] for operation in _SET_OPERATIONS):
            raise ValueError(f"the pattern has a set of characters that is not clear: {part}")
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            yield written
            written = ""
        else:
            written += part
    yield written
