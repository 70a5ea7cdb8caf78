"""A cached prefix is not computed again, and the results equal those of a cold prompt."""

import copy
import random
from itertools import pairwise
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.shared_prefill import SharedPrefill
from paged_kv.integrations.model_version import ModelVersion
from tests.support.generation import Run, assert_same_run, assert_same_runs, greedy, runs_of
from tests.support.grids import plain_only
from tests.support.stored_prompts import read
from tests.support.zoo import small_model

# A step of another length uses other kernels: float32 sums in another order.
TOLERANCE = 1e-4

TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(900)]


def warm(
    model: Any, factory: PagedCacheFactory, prompt: list[int], count: int = 4
) -> tuple[Run, int]:
    """A run after the cached part of a prompt, and the length of that part."""
    cache, cached = factory.fetch_cache(prompt)
    run = greedy(model, prompt[cached:], cache, count)
    factory.insert_cache(prompt + run.tokens, cache)
    factory.pool.check()
    return run, cached


def cold(model: Any, prompt: list[int], count: int = 4) -> Run:
    return greedy(model, prompt, PagedCacheFactory(model).make_cache(), count)


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return small_model("qwen3")


@pytest.mark.parametrize("split", [1, 2, 255, 256, 257, 511, 512, 513, 700])
def test_every_split_gives_the_tokens_of_a_cold_prompt(qwen3: Any, split: int) -> None:
    factory = PagedCacheFactory(qwen3)
    warm(qwen3, factory, [*TEXT[:split], TEXT[split] + 1, 2, 3])
    run, cached = warm(qwen3, factory, TEXT[:720])
    assert cached == split
    assert_same_run(run, cold(qwen3, TEXT[:720]), TOLERANCE)


def test_the_same_prompt_again_computes_one_token(qwen3: Any) -> None:
    factory = PagedCacheFactory(qwen3)
    first, cached = warm(qwen3, factory, TEXT[:600])
    assert cached == 0
    again, cached = warm(qwen3, factory, TEXT[:600])
    assert cached == 599
    assert_same_run(again, first, TOLERANCE)


def test_what_a_prompt_would_find_and_which_of_its_pages_are_in_use(qwen3: Any) -> None:
    factory = PagedCacheFactory(qwen3)
    assert factory.peek(TEXT[:700]) == (0, 0)
    warm(qwen3, factory, TEXT[:600])
    assert factory.peek(TEXT[:700]) == (600, 0)
    assert factory.peek(TEXT[:500], salt="other") == (0, 0)
    cache, _ = factory.fetch_cache(TEXT[:300])
    # The second page is copied before it is written, so only the first one is shared for good.
    assert factory.peek(TEXT[:500]) == (499, 256)
    greedy(qwen3, TEXT[299:300], cache, 1)
    assert factory.peek(TEXT[:500]) == (499, 256)
    del cache
    assert factory.peek(TEXT[:500]) == (499, 0)


def test_a_conversation_computes_only_what_is_new(qwen3: Any) -> None:
    factory = PagedCacheFactory(qwen3)
    text: list[int] = []
    for turn in range(6):
        text += TEXT[turn * 70 : turn * 70 + 70]
        run, cached = warm(qwen3, factory, text)
        assert cached == len(text) - 70
        assert_same_run(run, cold(qwen3, text), TOLERANCE)
        text += run.tokens


def test_pages_are_shared_and_only_the_tail_is_copied(qwen3: Any) -> None:
    factory = PagedCacheFactory(qwen3)
    warm(qwen3, factory, TEXT[:700])
    before = factory.stats()
    assert (before.blocks_used, before.blocks_cached) == (0, 3)
    caches = [factory.fetch_cache([*TEXT[:690], n])[0] for n in range(5)]
    stats = factory.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.cow_copies) == (3, 0, 0)
    for cache in caches:
        greedy(qwen3, [1], cache, 1)
    stats = factory.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.cow_copies) == (2 + 5, 1, 5)
    del caches, cache
    factory.pool.check()
    assert factory.stats().blocks_cached == 3


def test_who_goes_on_does_not_change_what_was_inserted(qwen3: Any) -> None:
    factory = PagedCacheFactory(qwen3)
    cache, _ = factory.fetch_cache(TEXT[:300])
    greedy(qwen3, TEXT[:300], cache, 1)
    factory.insert_cache(TEXT[:300], cache)
    greedy(qwen3, [5, 6, 7], cache, 20)
    prompt = TEXT[:320]
    run, cached = warm(qwen3, factory, prompt)
    assert cached == 300
    assert_same_run(run, cold(qwen3, prompt), TOLERANCE)


def test_other_weights_share_nothing(qwen3: Any) -> None:
    model = copy.deepcopy(qwen3)
    factory = PagedCacheFactory(model)
    warm(model, factory, TEXT[:300])
    projection = model.layers[0].self_attn.k_proj
    projection.weight = projection.weight * 1.5
    run, cached = warm(model, factory, TEXT[:300])
    assert cached == 0
    assert_same_run(run, cold(model, TEXT[:300]), TOLERANCE)


def test_the_same_numbers_in_another_dtype_are_other_weights(qwen3: Any) -> None:
    model = copy.deepcopy(qwen3)
    model.set_dtype(mx.bfloat16)
    version = ModelVersion(model)
    assert version.count == 0
    model.set_dtype(mx.float32)
    assert version.count == 1
    assert version.count == 1


@pytest.mark.parametrize("is_fetched", [False, True])
def test_what_was_begun_under_other_weights_is_not_found(qwen3: Any, is_fetched: bool) -> None:
    model = copy.deepcopy(qwen3)
    factory = PagedCacheFactory(model)
    cache = factory.fetch_cache(TEXT[:300])[0] if is_fetched else factory.make_cache()
    greedy(model, TEXT[:300], cache, 1)
    projection = model.layers[0].self_attn.k_proj
    projection.weight = projection.weight * 1.5
    factory.insert_cache(TEXT[:300], cache)
    assert factory.fetch_cache(TEXT[:301])[1] == 0


def test_cached_blocks_make_room_before_a_pool_is_exhausted(qwen3: Any) -> None:
    probe = PagedCacheFactory(qwen3, max_bytes=1 << 30)
    probe.can_admit(1)
    block_bytes = probe.pool.groups[0].allocator.formats[0].block_bytes
    factory = PagedCacheFactory(qwen3, max_bytes=6 * block_bytes)
    factory.can_admit(1)
    for first in range(8):
        prompt = [first, *TEXT[:600]]
        assert factory.can_admit(len(prompt))
        run, _ = warm(qwen3, factory, prompt)
        assert_same_run(run, cold(qwen3, prompt), TOLERANCE)
    stats = factory.stats()
    assert stats.evictions["room"] > 0
    assert stats.allocation_failures == 0
    assert factory.fetch_cache([7, *TEXT[:601]])[1] == 601
    assert factory.fetch_cache([0, *TEXT[:601]])[1] == 0


@pytest.mark.parametrize("page_format", ["q8", "q4", ("q8", "q4")])
def test_quantised_pages_are_shared_too(
    qwen3: Any, page_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    factory = PagedCacheFactory(qwen3, page_format=page_format)
    warm(qwen3, factory, TEXT[:500])
    run, cached = warm(qwen3, factory, TEXT[:520])
    assert cached == 500
    other = PagedCacheFactory(qwen3, page_format=page_format).make_cache()
    assert_same_run(run, greedy(qwen3, TEXT[:520], other, 4), TOLERANCE)


@pytest.mark.parametrize("page_format", ["q4", "fp16"])
def test_a_prompt_that_parts_within_a_quantised_page_goes_on_before_it(
    qwen3: Any, page_format: str
) -> None:
    factory = PagedCacheFactory(qwen3, page_format=page_format)
    warm(qwen3, factory, TEXT[:700])
    prompt = [*TEXT[:400], *TEXT[:60]]
    run, cached = warm(qwen3, factory, prompt)
    assert cached == (256 if page_format == "q4" else 400)
    other = PagedCacheFactory(qwen3, page_format=page_format).make_cache()
    assert_same_run(run, greedy(qwen3, prompt, other, 4), TOLERANCE)


@pytest.mark.parametrize("page_format", ["q4", "q8", "fp16"])
@pytest.mark.parametrize(
    "name", plain_only(["falcon_h1"], ["falcon_h1", "lfm2", "qwen3_next", "granitemoehybrid"])
)
def test_a_hybrid_goes_on_where_a_state_was_kept_but_not_within_a_quantised_page(
    name: str, page_format: str
) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, page_format=page_format)
    cache = factory.make_cache()
    ends = (45, 256, 301)
    for start, end in pairwise((0, *ends)):
        model(mx.array([TEXT[start:end]]), cache=cache)
        assert factory.insert_cache(TEXT[:end], cache) == end
    for parts, known in ((200, 45), (290, 256), (310, 301)):
        prompt = [*TEXT[:parts], TEXT[parts] + 1, 2, 3]
        found, cached = factory.fetch_cache(prompt)
        assert cached == (0 if page_format != "fp16" and known == 45 else known)
        run = greedy(model, prompt[cached:], found, 4)
        # In steps of the same lengths: others round differently, and a code at a tie flips.
        other = PagedCacheFactory(model, page_format=page_format).make_cache()
        for start, end in pairwise((0, *(end for end in ends if end <= cached))):
            model(mx.array([prompt[start:end]]), cache=other)
        assert_same_run(run, greedy(model, prompt[cached:], other, 4), 1e-3)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma3_text", "gemma3n", "gpt_oss", "qwen3_next", "falcon_h1", "deepseek_v3"),
        *("mamba", "mamba2", "rwkv7", "deepseek_v41"),
    ],
)
@pytest.mark.parametrize("length", [40, 300, 700])
def test_windows_and_recurrent_layers_go_on_where_somebody_stopped(name: str, length: int) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model)
    first, _ = warm(model, factory, TEXT[:length])
    longer = TEXT[:length] + first.tokens + [5, 6, 7, 8]
    run, cached = warm(model, factory, longer)
    assert cached == length + 4
    assert_same_run(run, cold(model, longer), 1e-3)
    factory.clear()
    factory.pool.check()


@pytest.mark.parametrize(
    "name", plain_only(["gemma3_text", "falcon_h1"], ["gemma3_text", "falcon_h1", "qwen3_next"])
)
def test_a_match_that_not_all_layers_can_use_is_shortened(name: str) -> None:
    """Never a wrong result: if no prompt ended there, the factory uses fewer tokens."""
    model = small_model(name)
    factory = PagedCacheFactory(model)
    warm(model, factory, TEXT[:200])
    warm(model, factory, TEXT[:800])
    for prompt in ([*TEXT[:500], 1, 2], TEXT[:203], [*TEXT[:100], 3]):
        run, cached = warm(model, factory, prompt)
        assert cached < len(prompt)
        assert_same_run(run, cold(model, prompt), 1e-3)


@pytest.mark.parametrize("name", plain_only(["stdlib-gemma3"], ["stdlib-llama", "stdlib-gemma3"]))
def test_a_trained_model_says_the_same_warm_and_cold(name: str, trained: Any) -> None:
    model, tokenizer = trained(name)
    text = tokenizer.encode("import os\n\n\ndef walk(path):\n" * 60)[:700]
    factory = PagedCacheFactory(model)
    for length in (257, len(text)):
        run, _ = warm(model, factory, text[:length])
        assert_same_run(run, cold(model, text[:length]), 1e-3)
    for length in (300, 256, 512):
        # The window has passed the tokens before.
        prompt = [*text[:length], *text[5:9]]
        run, cached = warm(model, factory, prompt)
        assert cached >= length
        assert_same_run(run, cold(model, prompt), 1e-3)


@pytest.mark.parametrize("rounds", [15, pytest.param(150, marks=pytest.mark.slow)])
def test_several_threads_look_up_insert_and_drop(qwen3: Any, rounds: int) -> None:
    factory = PagedCacheFactory(qwen3)
    warm(qwen3, factory, TEXT[:600])
    failures: list[BaseException] = []

    def come_and_go(seed: int) -> None:
        numbers = random.Random(seed)
        try:
            for _ in range(rounds):
                prompt = TEXT[: numbers.randrange(2, 640)]
                cache, cached = factory.fetch_cache(prompt)
                assert cached == min(len(prompt) - 1, 600)
                fork = copy.deepcopy(cache)
                for layer in fork:
                    layer.trim(numbers.randrange(cached + 1))
                factory.insert_cache(prompt[:cached], cache)
                factory.can_admit(1000)
                factory.stats()
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=come_and_go, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    factory.pool.check()
    assert factory.stats().blocks_used == 0


@pytest.mark.parametrize(
    "name", plain_only(["falcon_h1", "rwkv7"], ["falcon_h1", "qwen3_next", "rwkv7", "mamba2"])
)
def test_recurrent_layers_go_on_where_states_were_kept(name: str) -> None:
    """Prompts that are computed together leave a state after 2,048 tokens."""
    model = small_model(name)
    factory = PagedCacheFactory(model)
    text = [(7 * i * i + 3 * i) % 97 for i in range(2300)]
    SharedPrefill(factory, model, 700, lambda *_: True).starts([[*text, 1], [*text, 2]])
    for length, expected in ((2300, 2300), (2250, 2048), (2049, 2048), (2048, 0)):
        prompt = [*text[:length], 3, 4] if length > 2048 else text[:length]
        cache, cached = factory.fetch_cache(prompt)
        assert cached == expected
        # A run without a hit is a cold one. With 2,049 tokens it continues like one with 2,250.
        if length in (2300, 2250):
            run = greedy(model, prompt[cached:], cache, 3)
            assert_same_run(run, cold(model, prompt, 3), 1e-3)
        del cache
    states = factory.prefixes.snapshots.nbytes
    assert factory.prefixes.nbytes == states + factory.stats().bytes_retained
    factory.clear()
    assert factory.prefixes.nbytes == 0


def test_states_have_a_bound_of_their_own_and_the_last_used_stay() -> None:
    model = small_model("qwen3_next")
    factory = PagedCacheFactory(model)
    for first in range(2):
        read(model, factory, [first, *TEXT[:40]])
    snapshots = factory.prefixes.snapshots
    one = snapshots.nbytes // 2
    snapshots.max_bytes = 3 * one
    assert factory.pin([0, *TEXT[:40]]) == 41
    for first in range(2, 6):
        read(model, factory, [first, *TEXT[:40]])
        assert snapshots.nbytes <= 3 * one
    found = [factory.fetch_cache([first, *TEXT[:50]])[1] for first in range(6)]
    # The first is pinned, and pages without a state are of no use.
    assert [count > 0 for count in found] == [True, False, False, False, True, True]
    assert factory.unpin([0, *TEXT[:40]]) == 41


KINDS = ["qwen3_next", "falcon_h1", "mamba", "gemma3_text", "gpt_oss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_agents_get_cold_tokens_whatever_is_evicted(name: str) -> None:
    """Conversations go on, part and begin while there is room for few states and pages."""
    model: Any = small_model(name)
    probe = PagedCacheFactory(model)
    read(model, probe, TEXT[:300])
    one = probe.prefixes.snapshots.nbytes
    factory = PagedCacheFactory(model, max_bytes=8 * max(probe.stats().bytes_mapped, one))
    states = factory.prefixes.snapshots
    states.max_bytes = 4 * one
    prefill = SharedPrefill(factory, model, 700, lambda *_: True)
    rng = random.Random(name)
    texts, found = [TEXT[:300]], 0
    for _ in range(40):
        number = rng.randrange(len(texts))
        text = texts[number]
        if rng.random() < 0.4:  # a sub-agent, or a turn that is asked again
            texts = [*texts[-3:], text[: rng.choice([300, 512, len(text)])]]
            number = len(texts) - 1
        text = [*texts[number], *(rng.randrange(97) for _ in range(rng.randrange(1, 90)))][:900]
        found += factory.peek(text).num_tokens
        cache, cached, _ = prefill.start(text, [])
        run = greedy(model, text[cached:], cache, 3)
        factory.insert_cache(text + run.tokens, cache)
        del cache
        factory.pool.check()
        assert states.nbytes <= states.max_bytes
        assert_same_run(run, cold(model, text, 3), 1e-3)
        texts[number] = text + run.tokens
    assert found > 2000


SPLITS = (255, 256, 257, 511, 512, 513)
SPLIT_MODELS = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "deepseek_v3"]


@pytest.mark.parametrize("name", plain_only(["qwen3", "gemma3_text"], SPLIT_MODELS))
def test_splits_around_borders_of_blocks_give_what_a_cold_prompt_gives(name: str) -> None:
    """Each alone, and all of them in one batch."""
    model: Any = small_model(name)
    factory = PagedCacheFactory(model)
    expected = cold(model, TEXT[:530], 3)
    for split in SPLITS:
        read(model, factory, TEXT[:split])
        cache, cached = factory.fetch_cache(TEXT[:530])
        assert cached == split
        assert_same_run(greedy(model, TEXT[split:530], cache, 3), expected, 1e-3)
    prompts = [[*TEXT[:split], TEXT[split] + 1, *TEXT[:row]] for row, split in enumerate(SPLITS)]
    found = [factory.fetch_cache(prompt) for prompt in prompts]
    assert [cached for _, cached in found] == list(SPLITS)
    generator = BatchGenerator(model, max_tokens=3)
    rest = [prompt[cached:] for prompt, (_, cached) in zip(prompts, found, strict=True)]
    runs = runs_of(generator, generator.insert(rest, caches=[cache for cache, _ in found]))
    generator.close()
    assert_same_runs(runs, [cold(model, prompt, 3) for prompt in prompts], 2e-3)
