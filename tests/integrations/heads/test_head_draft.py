"""Drafts of prediction heads change nothing, whatever becomes of the pages that heads share."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.heads.model_head import heads
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.speculation.drafts import HeadDraft
from tests.support.generation import Run, assert_nothing_is_used, assert_same_runs, greedy, runs_of
from tests.support.heads import random_head
from tests.support.zoo import small_model

# The model verifies several tokens at a time, so float32 sums have another order.
TOLERANCE = 2e-3
LENGTHS = (3, 70, 1, 245, 17)
PROMPTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(300)]
NEW_TOKENS = 16
# With a window, with recurrent layers, and with latent attention; the soak takes the others.
MARKS: dict[str, Any] = {
    "gemma3_text layer_head": (),
    "qwen3_next eagle3": pytest.mark.slow,
    "deepseek_v3 layer_head": pytest.mark.slow,
}
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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(f"{name} {kind}", marks=MARKS.get(f"{name} {kind}", pytest.mark.soak))
        for name in FAMILIES
        for kind in ("layer_head", "eagle3")
    ],
)
@pytest.mark.slow
def test_rejected_drafts_change_nothing(case: str) -> None:
    name, kind = case.split()
    model = small_model(name)
    stock = alone(model)
    factory = PagedCacheFactory(model, max_bytes=64 << 20, head=random_head(model, kind))
    ours, generator = with_head(model, factory)
    assert_same_runs(ours, stock, TOLERANCE)
    counts = generator.counts
    assert counts.draft_tokens > 2 * counts.drafts > 40
    assert counts.accepted_tokens < counts.draft_tokens / 4
    factory.pool.check()
    del generator
    factory.clear()
    assert_nothing_is_used(factory)


def test_pages_on_disk_belong_to_a_head(tmp_path: Path) -> None:
    model, prompt = small_model("llama"), PROMPT
    options: dict[str, Any] = {"store": tmp_path, "max_bytes": 64 << 20}
    first = PagedCacheFactory(model, head=random_head(model), **options)
    cache, _ = first.fetch_cache(prompt)
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
    head = heads.get(factory.pool)
    assert head is not None
    tokens, drafts = mx.array([PROMPT]), []
    for given in (
        {"inputs": tokens},
        {"inputs": None, "input_embeddings": head.parts.embed(tokens)},
    ):
        cache = factory.make_cache()
        model(**given, cache=cache)
        model(mx.array([[5, 6]]), cache=cache)
        drafts.append(head.draft(cache[0].sequences, [7], 3))
        assert {layer.offset for layer in cache} == {len(PROMPT) + 2}
    assert drafts[0].shape == (1, 3)


def test_a_head_of_another_model_is_refused() -> None:
    model = small_model("llama")
    changes: list[dict[str, Any]] = [{"vocab_size": 96}, {"hidden_size": 128}]
    for change in changes:
        with pytest.raises(ValueError, match="this model has"):
            PagedCacheFactory(model, head=random_head(small_model("llama", **change)))
    with pytest.raises(ValueError, match="no prediction head"):
        HeadDraft(PagedCacheFactory(model))
