"""Describes what a text must fit, and checks it in a process of its own:
python grammars.py SECONDS BYTES.

The process reads `[kind, text]` as JSON from stdin. It exits with 0 if the grammar compiles; else
the reason is the last line of stderr. The system ends it in time, whatever llguidance does and
whether or not its parent still runs.

Only functions import llguidance: servers without the extra `structured` import this file.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from paged_kv.integrations.grammar.schemas import equivalent_schema

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# A message may quote the whole grammar.
MOST_TOLD = 300
# A small model may write spaces for ever where any number of them is allowed.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\r\n]{0,32}", "lenient": False}


class GrammarError(ValueError):
    """A grammar is wrong, too large, or too slow."""


class Grammar(NamedTuple):
    """What a whole text must fit."""

    kind: str  # "json_schema", "regex", "choice" or "grammar"
    # JSON of a schema; a regular expression; JSON of a list of texts; or a grammar in llguidance's
    # Lark syntax, or llama.cpp's GBNF.
    text: str


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """JSON that fits a schema of draft 2020-12. Its properties come in the schema's order."""
    return Grammar("json_schema", json.dumps(schema))


def json_object() -> Grammar:
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """A text that a regular expression matches as a whole."""
    return Grammar("regex", pattern)


def choice(texts: Sequence[str]) -> Grammar:
    """One of several texts."""
    return Grammar("choice", json.dumps(list(texts)))


def lark(text: str) -> Grammar:
    """A text of a context-free grammar, in llguidance's Lark syntax or in llama.cpp's GBNF."""
    return Grammar("grammar", text)


def one_line(message: str) -> str:
    """llguidance's message in one line, without the state of its parser."""
    words = " ".join(message.partition("<state>")[0].split())
    return words[:MOST_TOLD] or "the grammar does not compile"


def limits() -> LLParserLimits:
    """Of what llguidance makes of a grammar: far more than schemas of tools need. With its own
    limits one grammar could take 500 MB and a mask half a second; with these a mask takes tens of
    milliseconds at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def llguidance_text(grammar: Grammar) -> str:
    """A grammar as llguidance's matchers take it.

    Raises:
        GrammarError: it is not what its kind says.
    """
    from llguidance import LLMatcher, grammar_from

    try:
        match grammar.kind:
            case "json_schema":
                schema = json.dumps(equivalent_schema(json.loads(grammar.text)))
                return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
            case "choice":
                texts = (json.dumps(each, ensure_ascii=False) for each in json.loads(grammar.text))
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
            case "regex" | "grammar":
                return grammar_from(grammar.kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None
    raise ValueError(f"a grammar cannot be of the kind {grammar.kind!r}")


def require_valid(grammar: Grammar) -> None:
    """Compile a grammar without a tokenizer.

    Raises:
        GrammarError: it is wrong, or too large.
    """
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(llguidance_text(grammar), None, limits=limits())
    if error and not error.startswith("WARNING"):
        raise GrammarError(one_line(error))


def main() -> None:
    seconds, most_bytes = map(int, sys.argv[1:])
    signal.alarm(seconds)
    with suppress(ValueError):  # macOS limits no memory, and may say so
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    try:
        require_valid(Grammar(*json.load(sys.stdin)))
    except (GrammarError, RecursionError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
