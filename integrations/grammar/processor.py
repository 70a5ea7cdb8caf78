"""Masks logits with grammars: of one sequence as mlx-lm's logits processor, or of many at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.grammar.grammars import Grammar
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
        return within_grammars(logits[:, None], {0: self.grammar}, [known[-1:]])[:, 0]


def grammar_of(processors: Any) -> FollowedGrammar | None:
    """The grammar among the logits processors of a sequence, if there is one."""
    found = (each.grammar for each in processors or () if isinstance(each, GrammarProcessor))
    return next(found, None)


def within_grammars(
    logits: mx.array, grammars: dict[int, FollowedGrammar], inputs: list[list[int]]
) -> mx.array:
    """The logits of a step, masked.

    Args:
        logits: [rows, positions, vocabulary], which the model computes already.
        grammars: by row; each has taken the row's first input.
        inputs: of each row: a token, and drafted ones behind it that the grammar allows.
    """
    if not any(grammar.is_masking for grammar in grammars.values()):
        return logits
    rows, positions, vocab_size = logits.shape
    allowed = token_masks(
        [MaskedRow(each, row * positions, inputs[row][1:]) for row, each in grammars.items()],
        rows * positions,
        vocab_size,
    )
    return mx.where(allowed.reshape(logits.shape), logits, mx.array(-mx.inf, logits.dtype))


class MaskedRow(NamedTuple):
    """The positions of one sequence in a step.

    Attributes:
        grammar: of the sequence.
        first: the number of the sequence's first mask; those of its drafts follow.
        drafts: drafted tokens that the grammar allows; after each of them a mask is needed.
    """

    grammar: FollowedGrammar
    first: int
    drafts: list[int]


def token_masks(rows: Sequence[MaskedRow], positions: int, vocab_size: int) -> mx.array:
    """The tokens that may follow: bool [positions, vocabulary]. All may where no row has a mask.

    llguidance computes the masks on its own threads, without Python's lock.
    """
    masking = [row for row in rows if row.grammar.is_masking]
    known = max((row.grammar.vocab_size for row in masking), default=0)
    masks = np.full((positions, (known + 31) // 32), -1, dtype=np.int32)
    memory = masks.ctypes.data, masks.strides[0], positions
    begun = [row for row in masking if not row.grammar.is_free]
    if short := [(row.grammar.matcher, row.first) for row in begun if not row.drafts]:
        _executor().unsafe_compute_mask_ptr(short, *memory)
    if long := [(row.grammar.matcher, row.first, row.drafts) for row in begun if row.drafts]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(long, *memory)
    for row in masking:
        if (opening := row.grammar.opening) is not None:
            masks[row.first].view(np.uint32)[opening // 32] |= np.uint32(1 << opening % 32)
        row.grammar.note_errors()
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=known)
    allowed = np.ones((positions, vocab_size), dtype=np.bool_)
    allowed[:, :known] = bits[:, :vocab_size]
    for row in masking:
        # A model may have more logits than tokens. A sequence whose grammar failed is dropped.
        own = allowed[row.first : row.first + 1 + len(row.drafts)]
        own[:, known:] = False
        if row.grammar.is_free:
            own[:, row.grammar.barred] = False
        own |= row.grammar.error is not None
    return mx.array(allowed)


@cache
def _executor() -> Any:
    """llguidance's threads. Only who has a matcher asks: llguidance is installed."""
    from llguidance import LLExecutor

    return LLExecutor()
