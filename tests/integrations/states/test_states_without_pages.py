"""Models without pages: their states are found again, counted, bounded and batched."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.generation import text_generation
from paged_kv.integrations.generation.options import GenerateOptions
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.drafts import PlannedDraft
from tests.support.generation import assert_same_run, greedy, runs_of
from tests.support.grids import plain_only
from tests.support.zoo import small_model

TOLERANCE = 1e-4
TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(700)]


@pytest.fixture(scope="module", params=plain_only(["mamba2"], ["mamba2", "rwkv7"]))
def model(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


def insert(model: Any, factory: PagedCacheFactory, tokens: list[int], **named: Any) -> int:
    """Compute a prompt, and insert it."""
    cache = factory.make_cache()
    model(mx.array([tokens]), cache=cache)
    return factory.insert_cache(tokens, cache, **named)


def found(factory: PagedCacheFactory, tokens: list[int], **named: Any) -> int:
    return factory.fetch_cache(tokens, **named)[1]


def alone(model: Any, prompt: list[int], count: int = 4) -> Any:
    return greedy(model, prompt, make_prompt_cache(model), count)


def test_prompts_resume_at_the_longest_snapshot_of_their_salt(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes="64MB")
    cache = factory.make_cache()
    for start, end in ((0, 10), (10, 300), (300, 512)):
        model(mx.array([TEXT[start:end]]), cache=cache)
        assert factory.insert_cache(TEXT[:end], cache, salt="alice") == end
    for length, known in ((10, 0), (11, 10), (300, 10), (301, 300), (600, 512)):
        assert found(factory, TEXT[:length], salt="alice") == known
    assert found(factory, [*TEXT[:299], 1, 2], salt="alice") == 10
    assert found(factory, TEXT, salt="bob") == 0
    assert factory.peek(TEXT, salt="alice") == (512, 0)
    resumed, cached = factory.fetch_cache(TEXT, salt="alice")
    run = greedy(model, TEXT[cached:], resumed, 4)
    other = make_prompt_cache(model)
    for start, end in ((0, 10), (10, 300), (300, 512)):
        model(mx.array([TEXT[start:end]]), cache=other)
    assert_same_run(run, greedy(model, TEXT[512:], other, 4), TOLERANCE)
    assert factory.insert_cache([*TEXT, *run.tokens], resumed, salt="alice") == 704


def test_a_state_is_not_inserted_for_other_tokens_than_it_holds(model: Any) -> None:
    factory = PagedCacheFactory(model)
    cache = factory.make_cache()
    assert factory.insert_cache(TEXT[:10], cache) == 0
    model(mx.array([TEXT[:20]]), cache=cache)
    assert factory.insert_cache(TEXT[:10], cache) == 0
    assert found(factory, TEXT) == 0
    # More tokens than it holds: those that it holds are found.
    assert factory.insert_cache(TEXT[:30], cache) == 20
    assert found(factory, TEXT) == 20


def test_snapshots_and_their_tokens_keep_within_the_budget(model: Any) -> None:
    probe = PagedCacheFactory(model)
    insert(model, probe, TEXT[:300])
    one = probe.prefixes.nbytes
    assert one == probe.stats().bytes_states > 0
    factory = PagedCacheFactory(model, max_bytes=3 * one)
    assert insert(model, factory, [0, *TEXT[:299]]) == 300
    assert factory.pin([0, *TEXT[:299]]) == 300
    for first in range(1, 6):
        assert insert(model, factory, [first, *TEXT[:299]]) == 300
        assert factory.prefixes.nbytes <= 3 * one
    hits = [found(factory, [first, *TEXT[:310]]) for first in range(6)]
    assert hits == [300, 0, 0, 0, 300, 300]
    # Two blocks' worth of tokens each; those of the others went with their states.
    assert len(factory.pool.index) == 6
    factory.unpin([0, *TEXT[:299]])
    factory.prefixes.trim(max_prompts=1)
    assert (factory.prefixes.nbytes, len(factory.pool.index)) == (one, 2)
    factory.clear()
    assert (factory.prefixes.nbytes, len(factory.pool.index)) == (0, 0)
    small = PagedCacheFactory(model, max_bytes=1000)
    assert insert(model, small, TEXT[:40]) == len(small.pool.index) == 0


def test_sequences_of_a_batch_have_the_tokens_of_their_prompts_alone(model: Any) -> None:
    """One joins later; each is then found at its end."""
    factory = PagedCacheFactory(model)
    prompts = [TEXT[5:75], TEXT[:3], TEXT[9:10], TEXT[2:42]]
    generator = BatchGenerator(
        model, max_tokens=5, prefill_step_size=16, prefill_batch_size=2, completion_batch_size=3
    )
    caches = [factory.make_cache() for _ in prompts]
    uids = generator.insert([list(each) for each in prompts], caches=caches)
    last: dict[int, Any] = {}
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for each in responses:
            tokens[each.uid].append(each.token)
            last[each.uid] = each
    for uid, prompt in zip(uids, prompts, strict=True):
        assert tokens[uid] == greedy(model, prompt, make_prompt_cache(model), 5, 16).tokens
        told, cache = last[uid].all_tokens, last[uid].prompt_cache
        assert factory.insert_cache(told, cache) == len(told)
        assert found(factory, [*told, 1]) == len(told)


def test_installed_batches_compute_what_their_prompts_share_once(model: Any) -> None:
    """And begin with what is cached."""
    factory = PagedCacheFactory(model)
    insert(model, factory, TEXT[:200])
    prompts = [[*TEXT[:600], 1, 2], [*TEXT[:600], 3], TEXT[:210]]
    with factory:
        generator = BatchGenerator(model, max_tokens=3)
        with generator.stats() as stats:
            runs = runs_of(generator, generator.insert([list(each) for each in prompts]))
    # 400 shared tokens behind 200 cached ones, and each prompt's own.
    assert stats.prompt_tokens <= 400 + 2 + 1 + 10
    assert found(factory, [*TEXT[:600], 5]) == 600
    assert [len(run.tokens) for run in runs] == [3, 3, 3]
    for prompt, run in zip(prompts, runs, strict=True):
        start = factory.fetch_cache(prompt)
        assert run.tokens == greedy(model, prompt[start[1] :], start[0], 3).tokens


def test_padding_never_gets_into_a_snapshot() -> None:
    """A caller that pads by itself: some models take the padding for text."""
    model = small_model("mamba2")
    factory = PagedCacheFactory(model)
    cache = factory.make_cache()
    batch = [layer.merge([layer, layer]) for layer in cache]
    for layer in batch:
        layer.prepare(lengths=[20, 10], right_padding=[0, 10])
    model(mx.array([TEXT[:20], [*TEXT[:10], *[0] * 10]]), cache=batch)
    for layer in batch:
        layer.finalize()
    second = [layer.extract(1) for layer in batch]
    for told in (TEXT[:10], [*TEXT[:10], *[0] * 10]):
        assert factory.insert_cache(told, second) == 0
    assert found(factory, TEXT) == 0


@pytest.mark.slow
def test_a_generated_prompt_is_found_every_so_many_tokens(
    trained: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also by the next process, from the store, and behind a progress bar."""
    _, tokenizer = trained("stdlib-llama")
    model = small_model("mamba2", vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    monkeypatch.setattr(text_generation, "load", lambda _: (model, tokenizer))
    prompt = [(7 * i) % 400 + 20 for i in range(2500)]

    def cached_of(tokens: list[int]) -> str:
        options = GenerateOptions(max_tokens=2, cache=CacheOptions(store=tmp_path))
        generation = text_generation.TextGeneration(options)
        generation.stream(tokens, lambda done, total: None)
        generation.close()
        return capsys.readouterr().err.splitlines()[0]

    assert "cached" not in cached_of(prompt)
    assert "2048 of them cached" in cached_of(prompt)
    assert "2048 of them cached" in cached_of([*prompt[:2300], 5, 6])


def test_rejected_drafts_are_not_counted() -> None:
    """Two prompts of one length: steps of unequal length would have padding."""
    model = small_model("mamba2")
    factory = PagedCacheFactory(model)
    prompts = [TEXT[:9], TEXT[3:12]]
    texts = [[*each, *alone(model, each, 30).tokens] for each in prompts]
    generator = SpeculativeBatchGenerator(
        model, PlannedDraft(texts, wrong_every=3), lengths=FixedLengths(), max_tokens=12
    )
    uids = generator.insert(prompts, caches=[factory.make_cache() for _ in prompts])
    last: dict[int, Any] = {}
    while responses := generator.next_generated():
        last.update({each.uid: each for each in responses})
    for uid, text in zip(uids, texts, strict=True):
        counts = last[uid].speculation
        assert 0 < counts.accepted_tokens < counts.draft_tokens
        told = last[uid].all_tokens
        assert told == text[: len(told)]
        assert factory.insert_cache(told, last[uid].prompt_cache) == len(told)


def test_what_a_store_gave_back_is_not_inserted_for_other_weights(tmp_path: Path) -> None:
    model = small_model("rwkv7")
    factory = PagedCacheFactory(model, store=tmp_path)
    insert(model, factory, TEXT[:256])
    factory.close()
    factory = PagedCacheFactory(model, store=tmp_path)
    cache, cached = factory.fetch_cache(TEXT)
    assert cached == 256
    model.lm_head.weight = model.lm_head.weight * 2
    assert found(factory, TEXT) == 0
    factory.insert_cache(TEXT[:256], cache)
    assert found(factory, TEXT) == 0
    factory.close()


@pytest.mark.parametrize("name", plain_only(["gpt_bigcode"], ["gpt_bigcode", "llama4"]))
@pytest.mark.slow
def test_models_that_take_one_sequence_are_batched_one_after_the_other(name: str) -> None:
    """Ragged drafts have padding; so their steps have too."""
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes="64MB")
    prompts = [TEXT[:9], TEXT[3:60], TEXT[7:8]]
    texts = [[*each, *alone(model, each, 24).tokens] for each in prompts]
    generator = SpeculativeBatchGenerator(
        model,
        PlannedDraft(texts, lengths=(0, 3, 1, 4), wrong_every=5),
        lengths=FixedLengths(),
        max_tokens=16,
    )
    runs = runs_of(
        generator, generator.insert(prompts, caches=[factory.make_cache() for _ in prompts])
    )
    for run, text, prompt in zip(runs, texts, prompts, strict=True):
        assert run.tokens == text[len(prompt) : len(prompt) + 16]
