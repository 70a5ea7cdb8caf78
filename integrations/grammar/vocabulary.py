"""Compiles grammars for one tokenizer, with the extra `structured`."""

from __future__ import annotations

from random import Random
from time import thread_time
from typing import Any

import numpy as np

from paged_kv.extras import extra_module
from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.grammar.grammar_check import limits, llguidance_text
from paged_kv.integrations.grammar.grammars import Grammar, GrammarError, one_line

# Masks take a tenth of a millisecond, and of a vocabulary of 200,000 a few milliseconds at first.
MOST_MASK_S = 0.1
_TRIED_TOKENS = 32


class Vocabulary:
    """The texts of a model's tokens, as llguidance reads them. Making it takes up to a second.

    Args:
        tokenizer: mlx-lm's, of a model with a fast tokenizer.
        vocab_size: the number of the model's logits, which may be more than the tokens; None if it
            is the same.

    Attributes:
        tokens: llguidance's tokenizer.

    Raises:
        GrammarError: the tokenizer has no texts of tokens.
        ValueError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        from_tokenizer = extra_module("llguidance.hf", "structured").from_tokenizer
        try:
            self.tokens: Any = from_tokenizer(
                tokenizer._tokenizer,
                n_vocab=max(len(tokenizer), vocab_size or 0),
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
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokens, llguidance_text(grammar), log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        return CompiledGrammar(matcher, self.tokens)


class CompiledGrammar:
    """A grammar for the tokens of one model. Threads may share it.

    Args:
        matcher: llguidance's, at the beginning of the grammar.
        tokens: llguidance's tokenizer.

    Attributes:
        tokens: as given.
    """

    def __init__(self, matcher: Any, tokens: Any) -> None:
        self._matcher = matcher
        self.tokens = tokens
        self._is_tried = False

    def require_quick(self) -> None:
        """Follow the grammar for some random tokens.

        Raises:
            GrammarError: a mask took `MOST_MASK_S` of this thread's time, or could not be made.
        """
        if self._is_tried:
            return
        matcher, random = self._matcher.deep_copy(), Random(0)
        mask = np.zeros((self.tokens.vocab_size + 31) // 32, np.int32)
        for _ in range(_TRIED_TOKENS):
            began = thread_time()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(random.choice(allowed)) if len(allowed) else None
            if matcher.is_error() or token in (None, *self.tokens.eos_tokens):
                break
            matcher.consume_token(token)
            if (took := thread_time() - began) > MOST_MASK_S:
                raise GrammarError(f"its tokens take up to {took:.1f} s each: make it simpler")
        if matcher.is_error():
            raise GrammarError(f"it is too large to follow: {one_line(matcher.get_error())}")
        self._is_tried = True

    def begin(self, **place: Any) -> FollowedGrammar:
        """The grammar of one sequence, at its beginning.

        Args:
            place: where it holds, `FollowedGrammar`'s options.
        """
        return FollowedGrammar(self._matcher.deep_copy(), self.tokens, **place)
