"""Grammars as llguidance takes them, checked in a process of its own:
python grammar_check.py SECONDS BYTES.

Reads `[kind, text]` as JSON from stdin. Exits with 0 if the grammar compiles; else the reason is
the last line of stderr. The system ends this process in time, whatever llguidance does and whether
or not its parent still runs.

Only functions import llguidance: servers without the extra `structured` import this file.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paged_kv.integrations.grammar.equivalent_schemas import equivalent_schema
from paged_kv.integrations.grammar.grammars import Grammar, GrammarError, one_line

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# A small model may write spaces for ever where any number of them is allowed.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\r\n]{0,32}", "lenient": False}


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
                return LLMatcher.grammar_from_lark(_alternatives(json.loads(grammar.text)))
            case "regex" | "grammar":
                return grammar_from(grammar.kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None
    raise ValueError(f"a grammar cannot be of the kind {grammar.kind!r}")


def _alternatives(texts: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


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
    """Exit with 0 if the grammar compiles."""
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
