"""A grammar that sequences can begin."""

from __future__ import annotations

from random import Random
from time import thread_time
from typing import Any

import numpy as np

from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.grammar.grammars import GrammarError, told
from paged_kv.integrations.grammar.trigger import Trigger

# Masks take a tenth of a millisecond, and of a vocabulary of 200,000 a few milliseconds at first.
MOST_MASK_S = 0.1
_TRIED_TOKENS = 32


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
            raise GrammarError(f"it is too large to follow: {told(matcher.get_error())}")
        self._is_tried = True

    def begin(
        self,
        *,
        after: str | None = None,
        opening: int | None = None,
        repeats: bool = False,
        is_required: bool = False,
    ) -> FollowedGrammar:
        """The grammar of one sequence, at its beginning.

        Args:
            after: the text after which it begins; None means at once.
            opening, repeats: `FollowedGrammar`'s.
            is_required: whether the sequence must not end before the grammar begins.
        """
        return FollowedGrammar(
            self._matcher.deep_copy(),
            self.tokens.vocab_size,
            trigger=None if after is None else Trigger(after, self.tokens),
            opening=opening,
            repeats=repeats,
            barred=self.tokens.eos_tokens if is_required else (),
        )
