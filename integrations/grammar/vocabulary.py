"""Compiles grammars for one tokenizer. Import this with `extra_module`: it needs
the extra `structured`."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from paged_kv.integrations.grammar.compiled_grammar import CompiledGrammar
from paged_kv.integrations.grammar.grammar_texts import LIMITS, llguidance_text
from paged_kv.integrations.grammar.grammars import Grammar, GrammarError, told


class Vocabulary:
    """The texts of a model's tokens, as llguidance reads them. Making it takes up to a second.

    Args:
        tokenizer: mlx-lm's, of a model with a fast tokenizer.
        vocab_size: the number of the model's logits, which may be more than the tokens; None if it
            is the same.

    Raises:
        GrammarError: the tokenizer has no texts of tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        known = len(tokenizer)
        try:
            self.tokens: LLTokenizer = from_tokenizer(
                tokenizer._tokenizer,
                n_vocab=max(known, vocab_size or 0),
                eos_token=sorted(tokenizer.eos_token_ids),
            )
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer takes no grammars: {error}") from None

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar for sequences of this vocabulary. It takes milliseconds, or a second for very
        large grammars; other threads run meanwhile.

        Raises:
            GrammarError: the grammar is wrong, or too large.
        """
        matcher = LLMatcher(self.tokens, llguidance_text(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(told(matcher.get_error()))
        return CompiledGrammar(matcher, self.tokens)
