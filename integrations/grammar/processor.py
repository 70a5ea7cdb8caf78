"""Masks logits with grammars: of one sequence as mlx-lm's logits processor, or of a batch at once.

mlx-lm calls logits processors for one sequence after the other. In a `MaskedBatch` the model begins
to compute the step first. Then the sampled tokens of the last step are taken by the grammars, which
say what may follow, while the model computes; and one operation masks the logits of all sequences.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from paged_kv.integrations.grammar.grammars import Grammar
from paged_kv.integrations.grammar.vocabulary import FollowedGrammar, Vocabulary
from paged_kv.integrations.mlx_lm_internals import GeneratorParts, SteppedBatch


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
        last: Any = tokens[-1:].tolist()
        return within_grammars(logits[:, None], {0: self.grammar}, [last])[:, 0]


def grammar_of(processors: Any) -> FollowedGrammar | None:
    found = (each.grammar for each in processors or () if isinstance(each, GrammarProcessor))
    return next(found, None)


def other_processors(processors: Any) -> list[Any]:
    """The logits processors of a sequence that are not its grammar."""
    return [each for each in processors or () if not isinstance(each, GrammarProcessor)]


def within_grammars(
    logits: mx.array, grammars: dict[int, FollowedGrammar], inputs: list[list[int]]
) -> mx.array:
    """The logits of a step, -inf for the tokens that must not follow.

    Args:
        logits: [rows, positions, vocabulary], which the model computes already.
        grammars: by row; each has taken the row's first input.
        inputs: of each row: a token, and drafted ones behind it that the grammar allows.
    """
    masking = {row: grammar for row, grammar in grammars.items() if grammar.is_masking}
    if not masking:
        return logits
    known = max(grammar.vocab_size for grammar in masking.values())
    bits = np.unpackbits(
        _masks(masking, inputs, logits.shape, known), axis=-1, bitorder="little", count=known
    )
    allowed = np.ones(logits.shape, np.bool_)
    allowed[..., :known] = bits[..., : logits.shape[-1]]
    for row, grammar in masking.items():
        # A model may have more logits than tokens. A sequence whose grammar failed is dropped.
        own = allowed[row, : len(inputs[row])]
        own[:, known:] = False
        if grammar.is_free:
            own[:, grammar.barred] = False
        own |= grammar.error is not None
    return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, logits.dtype))


def _masks(
    masking: dict[int, FollowedGrammar], inputs: list[list[int]], shape: Any, known: int
) -> Any:
    """A bit for each of the known tokens: uint8 [rows, positions, bytes]. llguidance computes them
    on its own threads, without Python's lock."""
    rows, positions, _ = shape
    masks = np.full((rows, positions, (known + 31) // 32), -1, np.int32)
    memory = masks.ctypes.data, masks.strides[1], rows * positions
    begun = [(grammar.matcher, row * positions, inputs[row][1:])
             for row, grammar in masking.items() if not grammar.is_free]  # fmt: skip
    if short := [(matcher, first) for matcher, first, drafts in begun if not drafts]:
        _executor().unsafe_compute_mask_ptr(short, *memory)
    if long := [work for work in begun if work[-1]]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(long, *memory)
    for row, grammar in masking.items():
        if (opening := grammar.opening) is not None:
            masks[row, 0].view(np.uint32)[opening // 32] |= np.uint32(1 << opening % 32)
        grammar.record_errors()
    return masks.view(np.uint8)


@cache
def _executor() -> Any:
    """llguidance's threads. Only who has a matcher asks: llguidance is installed."""
    from llguidance import LLExecutor

    return LLExecutor()


class MaskedBatch(SteppedBatch):
    """mlx-lm's GenerationBatch, for sequences with a `GrammarProcessor` among others."""

    def grammars(self) -> dict[int, FollowedGrammar]:
        found = {row: grammar_of(each) for row, each in enumerate(self.logits_processors or [])}
        return {row: grammar for row, grammar in found.items() if grammar is not None}

    def step(self) -> Any:
        grammars = self.grammars()
        if not grammars:
            return super().step()
        model, processors = self.model, self.logits_processors
        self.model = partial(self._masked_model, model, grammars)
        self.logits_processors = [other_processors(each) for each in processors or []]
        try:
            return super().step()
        finally:
            self.model, self.logits_processors = model, processors

    def _masked_model(
        self, model: Any, grammars: dict[int, FollowedGrammar], inputs: mx.array, cache: list[Any]
    ) -> mx.array:
        """The masked logits [rows, 1, vocabulary] after inputs [rows, 1]."""
        logits: mx.array = model(inputs, cache=cache)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types
        tokens: Any = inputs[:, 0].tolist()
        counts = self.parts.num_tokens
        for row, grammar in grammars.items():
            grammar.take(tokens[row], counts[row])
        return within_grammars(logits, grammars, [[token] for token in tokens])


class MaskedBatchGenerator(BatchGenerator):
    """mlx-lm's BatchGenerator, whose sequences' logits are masked in one operation."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        GeneratorParts(self).generating = MaskedBatch.empty(model, self.sampler)
