"""The trained head of the embedded model: its drafts are accepted, and change nothing."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import BatchGenerator

from paged_kv import HeadDraft, PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.embedded import embedded_model
from paged_kv.integrations.heads.loading import load_own_head
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.generation import Run, assert_same_runs, runs_of

TOLERANCE = 2e-3
NEW_TOKENS = 32
# Tokens that a step emits at least, in the mean, where 3 are drafted.
LEAST = 1.4


@pytest.fixture(scope="module")
def model() -> Any:
    model = load(embedded_model())[0]
    model.set_dtype(mx.float32)
    return model


@pytest.fixture(scope="module")
def prompts(source_text: str) -> list[list[int]]:
    tokenizer = load(embedded_model())[1]
    tokens = tokenizer.encode(source_text)
    lengths = (257, 17, 300)
    return [tokens[700 * at : 700 * at + length] for at, length in enumerate(lengths)]


def undrafted(model: Any, prompts: list[list[int]], **options: Any) -> list[Run]:
    with PagedCacheFactory(model, max_bytes="256MB"):
        generator = BatchGenerator(model, max_tokens=NEW_TOKENS)
        return runs_of(generator, generator.insert(prompts, **options))


def new_generator(model: Any, factory: PagedCacheFactory) -> SpeculativeBatchGenerator:
    return SpeculativeBatchGenerator(
        model,
        HeadDraft(factory),
        lengths=FixedLengths(),
        num_draft_tokens=3,
        max_tokens=NEW_TOKENS,
    )


def drafted(
    model: Any, factory: PagedCacheFactory, prompts: list[list[int]], **options: Any
) -> tuple[list[Run], SpeculativeBatchGenerator]:
    with factory:
        generator = new_generator(model, factory)
        return runs_of(generator, generator.insert(prompts, **options)), generator


def with_head(model: Any, **options: Any) -> PagedCacheFactory:
    head = load_own_head(model, embedded_model())
    return PagedCacheFactory(model, head=head, **{"max_bytes": "256MB", **options})


def accepted(generator: SpeculativeBatchGenerator) -> float:
    """Tokens that a step emits, in the mean."""
    return 1 + generator.counts.accepted_tokens / generator.counts.drafts


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
def test_preempted_rows_draft_as_well(model: Any, prompts: list[list[int]]) -> None:
    prompts = [prompt[:250] for prompt in prompts if len(prompt) > 250]  # soon need a second page
    factory = with_head(model, max_bytes="32MB")
    with factory:
        generator = new_generator(model, factory)
        squeezed: Any = _Squeezed(generator, model, factory)
        ours = runs_of(squeezed, generator.insert(prompts))
    assert factory.stats().preemptions
    assert_same_runs(ours, undrafted(model, prompts), TOLERANCE)
    assert accepted(generator) > LEAST
