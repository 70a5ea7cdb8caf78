"""Makes a grammar a logits processor of mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.grammar.grammars import Grammar
from paged_kv.integrations.grammar.token_masks import MaskedRow, masked, token_masks
from paged_kv.integrations.grammar.vocabulary import Vocabulary


class GrammarProcessor:
    """Lets a sequence continue only with tokens that its grammar allows. It is one of mlx-lm's
    `logits_processors`, for one sequence: another sequence needs its own.

    In mlx-lm's `BatchGenerator` each sequence is masked by itself. `SpeculativeBatchGenerator`
    masks all of them in one operation, and drafts tokens that the grammar forces.

    Args:
        grammar: of the sequence, at its beginning.

    Example:
        >>> processor = GrammarProcessor.of(tokenizer, json_schema({"type": "integer"}))
        >>> generate(model, tokenizer, prompt, logits_processors=[processor])
    """

    def __init__(self, grammar: FollowedGrammar) -> None:
        self.grammar = grammar
        self._prompt_tokens: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, grammar: Grammar) -> GrammarProcessor:
        """A processor for one sequence.

        Args:
            tokenizer: mlx-lm's, of a model with a fast tokenizer.
            grammar: such as `json_schema({...})`.

        Raises:
            GrammarError: the grammar is wrong or too large, or the tokenizer is not a fast one.
            ValueError: llguidance is not installed.
        """
        return cls(Vocabulary(tokenizer).compiled(grammar).begin())

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask the logits of the next token.

        Args:
            tokens: [N], of the prompt and generated.
            logits: [1, vocabulary].
        """
        # The model computes while the mask is made.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types
        if self._prompt_tokens is None:
            self._prompt_tokens = len(tokens)
        generated = len(tokens) - self._prompt_tokens
        missing = generated - self.grammar.taken
        known: Any = tokens[len(tokens) - missing :].tolist()
        for at, token in enumerate(known, self.grammar.taken):
            self.grammar.take(token, at)
        if not self.grammar.is_masking:
            return logits
        return masked(logits, token_masks([MaskedRow(self.grammar, 0, [])], 1, logits.shape[-1]))


def grammar_of(processors: Any) -> FollowedGrammar | None:
    """The grammar among the logits processors of a sequence, if there is one."""
    found = (each.grammar for each in processors or () if isinstance(each, GrammarProcessor))
    return next(found, None)
