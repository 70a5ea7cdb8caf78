"""mlx-lm's GenerationBatch, whose sequences' logits are masked in one operation.

mlx-lm calls logits processors for one sequence after the other. Here the model begins to compute
the step first. Then the sampled tokens of the last step are taken by the grammars, which say what
may follow, while the model computes; and one operation masks the logits of all sequences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.grammar.processor import GrammarProcessor, grammar_of, within_grammars
from paged_kv.integrations.mlx_lm_internals import GeneratorParts, SteppedBatch


class MaskedBatch(SteppedBatch):
    """mlx-lm's GenerationBatch, for sequences with a `GrammarProcessor` among others."""

    def grammars(self) -> dict[int, FollowedGrammar]:
        """The grammars of the sequences that have one, by row."""
        found = {row: grammar_of(each) for row, each in enumerate(self.logits_processors or [])}
        return {row: grammar for row, grammar in found.items() if grammar is not None}

    def step(self) -> Any:
        """mlx-lm's step, with masked logits."""
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
    """mlx-lm's BatchGenerator, whose sequences' logits are masked in one operation.

    Args:
        model: a model of mlx-lm.
        options: BatchGenerator's.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        GeneratorParts(self).generating = MaskedBatch.empty(model, self.sampler)


def other_processors(processors: Any) -> list[Any]:
    """The logits processors of a sequence that are not its grammar."""
    return [each for each in processors or () if not isinstance(each, GrammarProcessor)]
