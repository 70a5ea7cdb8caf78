"""Grammars as llguidance takes them. Import this with `extra_module`: it needs the extra
`structured`, and nothing else that takes long to import."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from paged_kv.integrations.grammar.equivalent_schemas import equivalent_schema
from paged_kv.integrations.grammar.grammars import Grammar, GrammarError, told

# Far more than schemas of tools need. With llguidance's own limits one grammar could take 500 MB
# and a mask half a second; with these a mask takes tens of milliseconds at most.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)

# A small model may write spaces for ever where any number of them is allowed.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\r\n]{0,32}", "lenient": False}


def llguidance_text(grammar: Grammar) -> str:
    """A grammar as llguidance's matchers take it.

    Raises:
        GrammarError: it is not what its kind says.
    """
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
    error = LLMatcher.validate_grammar(llguidance_text(grammar), None, limits=LIMITS)
    if error and not error.startswith("WARNING"):
        raise GrammarError(told(error))
