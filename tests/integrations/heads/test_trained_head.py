"""The trained head of the embedded model: its drafts are accepted, and change nothing."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import HeadDraft, PagedCacheFactory, SpeculativeBatchGenerator, embedded_model
from paged_kv.integrations.heads.loading import load_own_head
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.generation import assert_same_runs, runs_of

TOLERANCE = 2e-3
NEW_TOKENS = 32
# Tokens that a step emits at least, in the mean, where 3 are drafted.
LEAST = 1.4


class _Squeezed:
    """A generator whose pool is full from its second step on, until a row is preempted."""

    def __init__(self, generator: Any, model: Any, factory: PagedCacheFactory) -> None:
        self._generator, self._model, self._factory = generator, model, factory
        self._steps = 0
        self._held: list[Any] = []

    def next_generated(self) -> Any:
        self._steps += 1
        while self._steps == 2 and self._factory.can_admit(1):
            self._held.append(self._factory.make_cache())
            self._model(mx.array([[1]]), cache=self._held[-1])
        if self._factory.stats().preemptions:
            self._held.clear()
        return self._generator.next_generated()


@pytest.mark.slow
def test_preempted_rows_draft_as_well(trained: Any, source_text: str) -> None:
    model, tokenizer = trained("stdlib-llama")
    tokens = tokenizer.encode(source_text)
    prompts = [tokens[start : start + 250] for start in (0, 1400)]  # soon need a second page
    head = load_own_head(model, embedded_model())
    factory = PagedCacheFactory(model, head=head, max_bytes="32MB")
    with factory:
        generator = SpeculativeBatchGenerator(
            model,
            HeadDraft(factory),
            lengths=FixedLengths(),
            num_draft_tokens=3,
            max_tokens=NEW_TOKENS,
        )
        squeezed: Any = _Squeezed(generator, model, factory)
        ours = runs_of(squeezed, generator.insert(prompts))
    assert factory.stats().preemptions
    with PagedCacheFactory(model, max_bytes="256MB"):
        undrafted = BatchGenerator(model, max_tokens=NEW_TOKENS)
        expected = runs_of(undrafted, undrafted.insert(prompts))
    assert_same_runs(ours, expected, TOLERANCE)
    # What a step emits, in the mean.
    assert 1 + generator.counts.accepted_tokens / generator.counts.drafts > LEAST
