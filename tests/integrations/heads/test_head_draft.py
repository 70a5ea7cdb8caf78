"""Drafts of prediction heads change nothing, whatever becomes of the pages that heads share."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from paged_kv import NGramDraft, PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.heads.model_head import head_of
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.speculation.head_draft import HeadDraft
from tests.support.generation import Run, assert_nothing_is_used, assert_same_runs, greedy, runs_of
from tests.support.heads import random_head
from tests.support.zoo import small_model

# The model verifies several tokens at a time, so float32 sums have another order.
TOLERANCE = 2e-3
LENGTHS = (3, 70, 1, 260, 17, 300, 31, 5)
PROMPTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
NEW_TOKENS = 24
FAMILIES = ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "jamba", "lfm2", "deepseek_v3"]


def alone(model: Any, prompts: list[list[int]] = PROMPTS) -> list[Run]:
    """The runs of the prompts, each alone, without drafts."""
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    return [greedy(model, prompt, factory.make_cache(), NEW_TOKENS) for prompt in prompts]


def with_head(
    model: Any, factory: PagedCacheFactory, **options: Any
) -> tuple[list[Run], SpeculativeBatchGenerator]:
    """The same in a batch with drafts, whatever the times of its steps are."""
    with factory:
        generator = SpeculativeBatchGenerator(
            model,
            HeadDraft(factory),
            lengths=FixedLengths(),
            max_tokens=NEW_TOKENS,
            num_draft_tokens=3,
            prefill_step_size=128,
            **options,
        )
        return runs_of(generator, generator.insert(PROMPTS)), generator


@pytest.mark.parametrize("kind", ["layer_head", "eagle3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rejected_drafts_change_nothing(name: str, kind: str) -> None:
    model = small_model(name)
    stock = alone(model)
    factory = PagedCacheFactory(model, max_bytes=64 << 20, head=random_head(model, kind))
    ours, generator = with_head(model, factory)
    assert_same_runs(ours, stock, TOLERANCE)
    counts = generator.counts
    assert counts.draft_tokens > 2 * counts.drafts > 100
    assert counts.accepted_tokens < counts.draft_tokens / 4
    factory.pool.check()
    del generator
    factory.clear()
    assert_nothing_is_used(factory)


@pytest.mark.parametrize("page_format", ["q8", "q4"])
def test_quantised_pages_of_a_head_give_rejected_tokens_back(page_format: Any) -> None:
    model = small_model("llama", head_dim=32)
    options: dict[str, Any] = {"max_bytes": 64 << 20, "page_format": page_format}
    plain = PagedCacheFactory(model, **options)
    stock = [greedy(model, prompt, plain.make_cache(), NEW_TOKENS) for prompt in PROMPTS]
    ours, _ = with_head(model, PagedCacheFactory(model, head=random_head(model), **options))
    same = sum(run.tokens == other.tokens for run, other in zip(ours, stock, strict=True))
    assert same >= len(PROMPTS) - 1


def test_sequences_that_wait_for_memory_draft_again() -> None:
    model = small_model("llama")
    factory = PagedCacheFactory(model, max_bytes=1 << 20, head=random_head(model))
    ours, generator = with_head(model, factory)
    assert_same_runs(ours, alone(model), TOLERANCE)
    assert generator.counts.drafts > 20
    del generator
    factory.clear()
    assert_nothing_is_used(factory)


def test_a_head_has_read_what_a_prefix_brings() -> None:
    model = small_model("llama")
    factory = PagedCacheFactory(model, max_bytes=64 << 20, head=random_head(model))
    head = head_of(factory.pool)
    assert head is not None
    prompt = PROMPTS[5]
    cold, warm = factory.make_cache(), factory.make_cache()
    model(mx.array([prompt]), cache=cold)
    factory.insert_cache(prompt, cold)
    found, count = factory.fetch_cache([*prompt, 5])
    assert count == len(prompt)
    model(mx.array([prompt]), cache=warm)
    for cache in (found, warm):
        model(mx.array([[5, 6]]), cache=cache)
    drafts = [head.draft(cache[0].sequences, [7], 3).tolist() for cache in (found, warm)]
    assert drafts[0] == drafts[1]
    assert len({layer.offset for layer in found}) == 1


def test_pages_on_disk_belong_to_a_head(tmp_path: Path) -> None:
    model, prompt = small_model("llama"), PROMPTS[5]
    options: dict[str, Any] = {"store": tmp_path, "max_bytes": 64 << 20}
    first = PagedCacheFactory(model, head=random_head(model), **options)
    cache = first.make_cache()
    model(mx.array([prompt]), cache=cache)
    first.insert_cache(prompt, cache)
    first.close()
    for head, known in ((random_head(model), 256), (None, 0), (random_head(model, "eagle3"), 0)):
        factory = PagedCacheFactory(model, head=head, **options)
        assert (factory.fetch_cache([*prompt, 5])[1] >= 256) == bool(known)
        factory.close()


def test_a_head_reads_what_is_called_by_names() -> None:
    """mlx-lm passes prompts so that have embeddings."""
    model: Any = small_model("llama")
    factory = PagedCacheFactory(model, max_bytes=64 << 20, head=random_head(model))
    head = head_of(factory.pool)
    assert head is not None
    tokens, drafts = mx.array([PROMPTS[3]]), []
    for given in (
        {"inputs": tokens},
        {"inputs": None, "input_embeddings": head.parts.embed(tokens)},
    ):
        cache = factory.make_cache()
        model(**given, cache=cache)
        model(mx.array([[5, 6]]), cache=cache)
        drafts.append(head.draft(cache[0].sequences, [7], 3))
        assert {layer.offset for layer in cache} == {len(PROMPTS[3]) + 2}
    assert drafts[0].shape == (1, 3)


def test_other_drafts_and_no_drafts_work_beside_a_head() -> None:
    model = small_model("qwen3_next")
    factory = PagedCacheFactory(model, max_bytes=64 << 20, head=random_head(model))
    stock = alone(model)
    with factory:
        for generator in (
            BatchGenerator(model, max_tokens=NEW_TOKENS),
            SpeculativeBatchGenerator(model, NGramDraft(1), max_tokens=NEW_TOKENS),
        ):
            assert_same_runs(runs_of(generator, generator.insert(PROMPTS)), stock, TOLERANCE)


def test_a_head_of_another_model_is_refused() -> None:
    model = small_model("llama")
    other = random_head(small_model("llama", vocab_size=96))
    with pytest.raises(ValueError, match="a vocabulary of 96, and this model has 128"):
        PagedCacheFactory(model, head=other)
    wider = random_head(small_model("llama", hidden_size=128))
    with pytest.raises(ValueError, match="hidden states of width 128, and this model has 64"):
        PagedCacheFactory(model, head=wider)


def test_a_draft_of_a_factory_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="the factory has no prediction head"):
        HeadDraft(PagedCacheFactory(small_model("llama")))


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute on a quiet machine
def test_tokens_sampled_with_a_head_have_the_models_distribution() -> None:
    """20,000 samples of the second and of the third token, of 16."""
    model, prompt, samples = small_model("llama", vocab_size=16), [3, 1, 4], 20_000
    factory = PagedCacheFactory(model, max_bytes=64 << 20, head=random_head(model))
    mx.random.seed(5)
    found = []
    with factory:
        for _ in range(samples // 250):
            generator = SpeculativeBatchGenerator(
                model,
                HeadDraft(factory),
                lengths=FixedLengths(),
                num_draft_tokens=2,
                max_tokens=3,
                sampler=make_sampler(temp=1.0),
                completion_batch_size=250,
                prefill_batch_size=250,
            )
            uids = generator.insert([prompt] * 250)
            found += [run.tokens for run in runs_of(generator, uids)]
            assert generator.counts.accepted_tokens
    first = mx.softmax(model(mx.array([prompt]))[0, -1])
    pairs = mx.array([[*prompt, one, two] for one in range(16) for two in range(16)])
    logits = model(pairs)[:, -2:]
    after_one, after_two = mx.softmax(logits, axis=-1).swapaxes(0, 1).reshape(2, 16, 16, 16)
    second = (first[:, None] * after_one[:, 0]).sum(axis=0)
    of_pairs = first[:, None] * after_one[:, 0]
    third = (of_pairs[:, :, None] * after_two).sum(axis=(0, 1))
    for at, wanted in ((1, second), (2, third)):
        counts = np.bincount([tokens[at] for tokens in found], minlength=16)
        expected = samples * np.array(wanted)
        # Of 15 degrees of freedom: once in 10,000 times it is larger.
        assert ((counts - expected) ** 2 / expected).sum() < 44.3
