"""Compiles grammars for one tokenizer, with the extra `structured`, and follows sequences through
them.

A sequence is *free* before its grammar begins, as while a model thinks; then any token may come.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from time import thread_time
from typing import Any

import numpy as np

from paged_kv.extras import extra_module
from paged_kv.integrations.grammar.grammars import (
    Grammar,
    GrammarError,
    limits,
    llguidance_text,
    one_line,
)

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
    """A grammar for the tokens of one model: llguidance's matcher at the beginning of the grammar,
    and its tokenizer. Threads may share it."""

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
        """The grammar of one sequence, at its beginning, with `FollowedGrammar`'s options."""
        return FollowedGrammar(self._matcher.deep_copy(), self.tokens, **place)


class Trigger:
    """The text after which a grammar begins, such as `</think>`. Tokens may end within it, or go
    on behind it. `tokens` is llguidance's tokenizer."""

    def __init__(self, text: str, tokens: Any) -> None:
        self._text = text.encode()
        self._tokens = tokens
        self._last = b""

    def take(self, token: int) -> list[int] | None:
        """Take the next token. If the text ends in it, returns the tokens of what the token says
        behind it."""
        said = self._last + bytes(self._tokens.decode_bytes([token]))
        _, found, rest = said.partition(self._text)
        if not found:
            self._last = said[max(0, len(said) - len(self._text) + 1) :]
            return None
        self._last = b""
        behind: list[int] = self._tokens.tokenize_bytes(rest) if rest.strip() else []
        return behind

    def before(self, tokens: list[int], barred: Sequence[int]) -> int:
        """How many of these tokens come before the text ends, or before a barred one."""
        last = self._last
        try:
            for count, token in enumerate(tokens):
                if token in barred or self.take(token) is not None:
                    return count
            return len(tokens)
        finally:
            self._last = last


class FollowedGrammar:
    """A sequence within its grammar.

    Args:
        matcher: llguidance's, at the beginning of the grammar. It belongs to this sequence alone.
        tokens: llguidance's tokenizer.
        after: the text after which the grammar begins; None means at once.
        opening: a token that may come first in place of the grammar's; then the grammar begins
            after that text. Models that may think write `<think>`. None: the text must come.
        repeats: whether the sequence is free again after the grammar's end; else it ends there.
        is_required: whether the sequence must not end before the grammar begins.

    Attributes:
        is_free: whether the grammar has not begun, and any token may come that is not barred.
        taken: how many tokens were generated and taken.
        error: why the matcher could not go on; None if all is well. Any token may come then, and
            the sequence should be dropped.
        barred: tokens that must not come before the grammar begins.
        vocab_size: the number of tokens that the matcher knows.
        matcher: as given.
    """

    def __init__(
        self,
        matcher: Any,
        tokens: Any,
        *,
        after: str | None = None,
        opening: int | None = None,
        repeats: bool = False,
        is_required: bool = False,
    ) -> None:
        self.is_free = after is not None and opening is None
        self.taken = 0
        self.error: str | None = None
        self.barred: Sequence[int] = tokens.eos_tokens if is_required else ()
        self.vocab_size: int = tokens.vocab_size
        self.matcher = matcher
        self._trigger = None if after is None else Trigger(after, tokens)
        self._repeats = repeats
        self._opening = opening

    @property
    def is_masking(self) -> bool:
        """Whether some tokens must not come next."""
        return (not self.is_free or len(self.barred) > 0) and self.error is None

    @property
    def opening(self) -> int | None:
        """A token that may come next besides those of the grammar."""
        return self._opening if self.taken == 0 else None

    def take(self, token: int, at: int) -> None:
        """Take the generated token number `at`, unless it is taken already."""
        assert at <= self.taken, f"token {at} comes after {self.taken} tokens"
        if at < self.taken:
            return
        is_opening = token == self.opening
        self.taken += 1
        if is_opening:
            self.is_free = True
        elif self.is_free:
            assert self._trigger is not None, "free sequences have a trigger"
            behind = self._trigger.take(token)
            fits = behind == [] or (behind and self.matcher.validate_tokens(behind) == len(behind))
            if behind is not None and fits:
                self.is_free = False
                self._match(behind)
        elif self.error is None:
            self._match([token])

    def allowed(self, tokens: list[int]) -> int:
        """How many of these tokens may come next, one after the other. Those by which a sequence
        would become free, or be free no more, do not count: masks change there."""
        if self.is_free:
            assert self._trigger is not None, "free sequences have a trigger"
            return self._trigger.before(tokens, self.barred)
        if self.error is not None or self.opening is not None or self.matcher.is_stopped():
            return 0
        return self._before_end(tokens) if self._repeats else self.matcher.validate_tokens(tokens)

    @property
    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice of the text. Others may stand for
        the same text."""
        if self.is_free or self.error is not None or self.opening is not None:
            return []
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens

    def drafted(self, proposed: list[int], most: int) -> list[int]:
        """At most so many tokens that may come next: those that the grammar forces, or the
        beginning of those that are proposed, whichever is longer."""
        fitting = proposed[: self.allowed(proposed)]
        forced = self.forced
        forced = forced[: self.allowed(forced)]
        return max(fitting, forced, key=len)[:most]

    def record_errors(self) -> None:
        if self.matcher.is_error():
            self.error = one_line(self.matcher.get_error())

    def _before_end(self, tokens: list[int]) -> int:
        count = 0
        while count < len(tokens) and self.matcher.try_consume_tokens(tokens[count : count + 1]):
            count += 1
            if self.matcher.is_stopped():
                self.matcher.rollback(count)
                return count - 1
        self.matcher.rollback(count)
        return count

    def _match(self, tokens: list[int]) -> None:
        if self.matcher.is_stopped():
            return  # only the token that ends a text can come, and a stopped matcher refuses it
        if tokens and not self.matcher.consume_tokens(tokens):
            self.record_errors()
        elif self._repeats and self.matcher.is_stopped():
            self.matcher.reset()
            self.is_free = True
