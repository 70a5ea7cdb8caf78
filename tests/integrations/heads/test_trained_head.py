"""The trained head of the embedded model: its drafts are accepted, and change nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, StopSequences

from paged_kv import HeadDraft, PagedCacheFactory, SpeculativeBatchGenerator, load_head
from paged_kv.embedded import embedded_model
from paged_kv.integrations.grammar.grammars import json_schema, regex
from paged_kv.integrations.grammar.masked_steps import MaskedBatchGenerator
from paged_kv.integrations.grammar.processor import GrammarProcessor
from paged_kv.integrations.grammar.vocabulary import Vocabulary
from paged_kv.integrations.heads.loading import load_own_head
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.generation import Run, assert_nothing_is_used, assert_same_runs, runs_of

TOLERANCE = 2e-3
NEW_TOKENS = 48
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
    lengths = (300, 17, 530, 256, 90, 257, 31, 400)
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


def test_its_drafts_are_accepted_and_change_nothing(model: Any, prompts: list[list[int]]) -> None:
    factory = with_head(model)
    ours, generator = drafted(model, factory, prompts)
    assert_same_runs(ours, undrafted(model, prompts), TOLERANCE)
    assert accepted(generator) > LEAST
    del generator
    factory.clear()
    assert_nothing_is_used(factory)


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


@pytest.mark.parametrize("page_format", ["q8", "q4"])
def test_quantised_pages_draft_as_well(
    page_format: Any, model: Any, prompts: list[list[int]]
) -> None:
    _, generator = drafted(model, with_head(model, page_format=page_format), prompts)
    assert accepted(generator) > LEAST


def test_a_prefix_brings_what_the_head_has_read(model: Any, prompts: list[list[int]]) -> None:
    factory = with_head(model)
    found = []
    for _ in range(2):
        caches, known = zip(*map(factory.fetch_cache, prompts), strict=True)
        found.append(sum(known))
        with factory:
            generator = new_generator(model, factory)
            rests = [prompt[count:] for prompt, count in zip(prompts, known, strict=True)]
            heads = [prompt[:count] for prompt, count in zip(prompts, known, strict=True)]
            uids = generator.insert_segments(
                [[rest] for rest in rests], caches=list(caches), all_tokens=heads
            )
            del caches
            _keep(factory, generator, uids, prompts)
        assert accepted(generator) > LEAST
        del generator
    assert found[0] == 0
    assert found[1] > sum(map(len, prompts)) / 2


def _keep(
    factory: PagedCacheFactory,
    generator: SpeculativeBatchGenerator,
    uids: Sequence[int],
    prompts: list[list[int]],
) -> None:
    """Generate, and cache the texts."""
    while responses := generator.next_generated():
        for each in responses:
            if each.prompt_cache is not None and each.all_tokens is not None:
                factory.insert_cache(
                    each.all_tokens[: each.prompt_cache[0].offset], each.prompt_cache
                )


def test_a_row_ends_at_a_stop_among_accepted_drafts(model: Any, prompts: list[list[int]]) -> None:
    stock = undrafted(model, prompts)
    stops = [StopSequences([run.tokens[9:11]]) for run in stock]
    ours, generator = drafted(model, with_head(model), prompts, stop_sequences=stops)
    cut = undrafted(model, prompts, stop_sequences=stops)
    assert [run.tokens for run in ours] == [run.tokens for run in cut]
    assert accepted(generator) > 1.2


def test_grammars_hold_and_texts_are_those_without_drafts(
    model: Any, prompts: list[list[int]]
) -> None:
    vocabulary = Vocabulary(load(embedded_model())[1])
    texts = [regex(r"[a-z_.=() \n]{40,}"), json_schema({"type": "array", "minItems": 9}), None]
    compiled = [None if each is None else vocabulary.compiled(each) for each in texts]

    def grammars() -> list[Any]:
        return [[] if each is None else [GrammarProcessor(each.begin())] for each in compiled]

    with PagedCacheFactory(model, max_bytes="256MB"):
        plain = MaskedBatchGenerator(model, max_tokens=NEW_TOKENS)
        stock = runs_of(plain, plain.insert(prompts[:3], logits_processors=grammars()))
    ours, generator = drafted(model, with_head(model), prompts[:3], logits_processors=grammars())
    assert_same_runs(ours, stock, TOLERANCE)
    assert generator.counts.accepted_tokens > 10


def test_the_head_is_what_its_folder_says() -> None:
    folder = Path(embedded_model()) / "draft_head"
    head = load_head(folder)
    assert (head.hidden_size, head.vocab_size) == (256, 4096)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3 << 20
