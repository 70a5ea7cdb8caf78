"""A preempted sequence gets the tokens that it would have got, and no step exhausts a pool."""

import copy
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.sample_utils import make_logits_processors

from paged_kv import PagedCacheFactory, PoolExhausted
from paged_kv.integrations.batching.pool_memory import pool_size
from paged_kv.integrations.batching.preemption import Preemption, attach
from paged_kv.integrations.batching.rows import Line, running_uids
from paged_kv.pool.arguments import FormatChoice
from paged_kv.prefix.rates import Rates
from paged_kv.server.engine.sampling import RandomSampler
from tests.support.generation import Run, assert_nothing_is_used, assert_same_runs, runs_of
from tests.support.grids import plain_only
from tests.support.zoo import small_model

TOLERANCE = 2e-3
# Each needs a block for its prompt, and two more. One of those is kept free when it begins.
NEW_TOKENS = 280
LENGTHS = (250, 245, 255, 248)
PROMPTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
LARGE = 256 << 20


def factory_of_blocks(
    model: Any, blocks: float, page_format: FormatChoice = "fp16", **options: Any
) -> PagedCacheFactory:
    """With memory for so many blocks in each group of layers."""
    probe = PagedCacheFactory(model, max_bytes=LARGE, page_format=page_format)
    assert probe.can_admit(1)
    block_bytes = sum(group.written_block_bytes for group in probe.pool.groups)
    most = int(blocks * block_bytes)
    return PagedCacheFactory(model, max_bytes=most, page_format=page_format, **options)


def generator_of(model: Any, **options: Any) -> BatchGenerator:
    defaults = {"completion_batch_size": 8, "prefill_batch_size": 4, "prefill_step_size": 100}
    return BatchGenerator(model, **{**defaults, **options})


def served(
    factory: PagedCacheFactory,
    model: Any,
    make_options: Callable[[], dict[str, Any]] = dict,
    prompts: list[list[int]] = PROMPTS,
) -> list[Run]:
    """All prompts at once, through BatchGenerator with the factory installed."""
    with factory:
        generator = generator_of(model)
        options = {"max_tokens": [NEW_TOKENS] * len(prompts), **make_options()}
        return runs_of(generator, generator.insert(prompts, **options))


def assert_equal_under_pressure(
    model: Any,
    make_options: Callable[[], dict[str, Any]] = dict,
    blocks: float = 5,
    page_format: FormatChoice = "fp16",
) -> PagedCacheFactory:
    """Returns the factory with the small pool; all need 12 blocks."""
    large = PagedCacheFactory(model, max_bytes=LARGE, page_format=page_format)
    small = factory_of_blocks(model, blocks, page_format)
    expected = served(large, model, make_options)
    assert_same_runs(served(small, model, make_options), expected, TOLERANCE)
    assert large.stats().preemptions == 0
    assert small.stats().preemptions > 0
    assert_nothing_is_used(large, small)
    return small


@pytest.mark.parametrize(
    "name", plain_only(["qwen3", "falcon_h1"], ["qwen3", "falcon_h1", "gemma3_text"])
)
def test_greedy_texts_are_equal(name: str) -> None:
    """Without a window, with recurrent layers, and with windows."""
    assert_equal_under_pressure(small_model(name), blocks=5.75 if name == "gemma3_text" else 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "falcon_h1"])
def test_compiled_steps_are_preempted_like_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    monkeypatch.setenv("PAGED_KV_COMPILE", "1")
    small = assert_equal_under_pressure(small_model(name))
    assert sum(each.repeated for each in small.recordings.values()) > NEW_TOKENS


@pytest.mark.slow
def test_what_is_evicted_is_computed_again() -> None:
    small = assert_equal_under_pressure(small_model("qwen3"), blocks=4)
    assert 0 < small.stats().tokens_recomputed <= small.stats().preemptions * 535


def seeded() -> dict[str, Any]:
    class Options:
        temperature, top_p, top_k, min_p = 1.0, 0.9, 4, 0.0
        xtc_probability, xtc_threshold = 0.0, 0.0

    options: Any = Options()
    return {"samplers": [RandomSampler(options, [], seed) for seed in range(len(PROMPTS))]}


def penalised() -> dict[str, Any]:
    processors = [make_logits_processors(None, 1.3, 30) for _ in PROMPTS]
    return {"logits_processors": processors}


@pytest.mark.slow
def test_a_tenth_of_the_memory_that_all_need_is_enough() -> None:
    model = small_model("qwen3")
    prompts = [[(5 * i * i + 11 * k + 1) % 97 for i in range(240 + k)] for k in range(14)]
    large, small = PagedCacheFactory(model, max_bytes=LARGE), factory_of_blocks(model, 4.2)
    expected = served(large, model, prompts=prompts)
    assert_same_runs(served(small, model, prompts=prompts), expected, TOLERANCE)
    assert small.stats().preemptions > 0
    assert_nothing_is_used(large, small)


@pytest.mark.slow
@pytest.mark.parametrize("is_quick", [True, False])
def test_what_is_evicted_is_read_again_if_that_is_quicker(
    is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("qwen3")
    monkeypatch.setattr(Rates, "is_reading_quicker", lambda *_: is_quick)
    factory = factory_of_blocks(model, 4, store=tmp_path / "pages")
    store = factory.store
    assert store is not None
    # On a busy machine pages would be wanted before they are written.
    offers = store.offers
    monkeypatch.setattr(store, "offers", lambda *wanted: offers(*wanted) if store.flush() else [])
    expected = served(PagedCacheFactory(model, max_bytes=LARGE), model)
    assert_same_runs(served(factory, model), expected, TOLERANCE)
    stats = factory.stats()
    assert stats.preemptions > 0
    assert (stats.tokens_reread > 0) == is_quick
    assert stats.tokens_reread <= stats.tokens_read
    assert factory.prefixes.rates.computing.seconds_for(1)
    factory.close()


@pytest.mark.slow
@pytest.mark.parametrize("make_options", [seeded, penalised])
def test_random_and_penalised_texts_are_equal(make_options: Callable[[], dict[str, Any]]) -> None:
    assert_equal_under_pressure(small_model("qwen3"), make_options, blocks=4)


@pytest.mark.slow
@pytest.mark.parametrize("page_format", ["q8", "q4"])
def test_texts_from_quantised_pages_are_equal(
    page_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences so short take more memory when they begin than later, so the pool only seems
    exhausted, in the middle of pages and at their borders."""
    model = small_model("qwen3")
    large, small = (
        PagedCacheFactory(model, max_bytes=LARGE, page_format=page_format) for _ in range(2)
    )
    expected = served(large, model)
    steps, reserve = count(), Preemption.reserve

    def reserve_or_not(preemption: Preemption, running: list[int]) -> bool:
        seems_full = len(running) > 1 and next(steps) in (10, 60, 150)
        return not seems_full and reserve(preemption, running)

    monkeypatch.setattr(Preemption, "reserve", reserve_or_not)
    assert_same_runs(served(small, model), expected, TOLERANCE)
    assert small.stats().preemptions > 0
    assert_nothing_is_used(large, small)


def test_pages_are_requantised_before_a_sequence_is_preempted() -> None:
    model = small_model("qwen3")
    small = factory_of_blocks(model, 9, "auto")
    runs = served(small, model)
    assert [len(run.tokens) for run in runs] == [NEW_TOKENS] * len(PROMPTS)
    stats = small.stats()
    assert sum(stats.requantisations.values()) > 0
    assert_nothing_is_used(small)


def until_preempted(generator: BatchGenerator, factory: PagedCacheFactory) -> None:
    while not factory.stats().preemptions:
        assert generator.next_generated()


@pytest.mark.slow
def test_a_stop_word_matches_across_a_preemption() -> None:
    """Of its two tokens the first came before the preemption, and the second after it."""
    model = small_model("qwen3")
    whole = served(PagedCacheFactory(model, max_bytes=LARGE), model, seeded)
    factory = factory_of_blocks(model, 5)
    with factory:
        generator = generator_of(model)
        uids = generator.insert(PROMPTS, max_tokens=[NEW_TOKENS] * 4, **seeded())
        until_preempted(generator, factory)
        (uid, kept) = next(iter(_preempted(generator).items()))
        (count,) = kept._num_tokens
        stop = whole[uid].tokens[count - 1 : count + 1]
        kept.stop_sequences = [StopSequences([stop])]
        kept._matchers = [kept.stop_sequences[0].matcher()]
        kept._matchers[0].advance(stop[0])
        runs = runs_of(generator, uids)
    assert runs[uid].tokens == stop[1:]
    assert_nothing_is_used(factory)


def _preempted(generator: Any) -> dict[int, Any]:
    preempted: dict[int, Any] = generator.paged_kv_preemption._generating
    return preempted


def test_a_preempted_sequences_pages_are_its_sessions() -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 5)
    with factory:
        generator: Any = generator_of(model)
        uids = generator.insert(PROMPTS, max_tokens=[NEW_TOKENS] * 4)
        generator.paged_kv_preemption.sessions.update({uid: f"chat {uid}" for uid in uids})
        until_preempted(generator, factory)
        (preempted, *_) = _preempted(generator)
        assert factory.fetch_cache(PROMPTS[uids.index(preempted)])[1] > 0
        assert factory.end_session(f"chat {preempted}") > 0
        assert factory.fetch_cache(PROMPTS[uids.index(preempted)])[1] == 0
        generator.remove(uids)
        generator.insert(PROMPTS[:1], max_tokens=[1])
        generator.next()
        assert not generator.paged_kv_preemption.sessions


def test_a_preempted_sequences_pages_keep_its_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 5)
    with factory:
        generator: Any = generator_of(model)
        uids = generator.insert(PROMPTS, max_tokens=[NEW_TOKENS] * 4)
        generator.paged_kv_preemption.salts.update(dict.fromkeys(uids, "a user's"))
        until_preempted(generator, factory)
        prompt = PROMPTS[uids.index(next(iter(_preempted(generator))))]
        assert factory.fetch_cache(prompt)[1] == 0
        assert factory.fetch_cache(prompt, salt="a user's")[1] > 0
        returning = list(_preempted(generator))
        generator.remove([uid for uid in uids if uid not in returning])
        fetch, salts = factory.fetch_cache, []

        def noted(*arguments: Any, **options: Any) -> Any:
            salts.append(options.get("salt"))
            return fetch(*arguments, **options)

        monkeypatch.setattr(factory, "fetch_cache", noted)
        generator.next()
        assert salts
        assert set(salts) == {"a user's"}
        # Those of the others have ended with them.
        assert generator.paged_kv_preemption.salts == dict.fromkeys(returning, "a user's")
        generator.remove(returning)


def test_a_preempted_sequence_keeps_its_uid_and_can_be_removed_or_extracted() -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 4)
    with factory:
        generator = generator_of(model)
        uids = generator.insert(PROMPTS, max_tokens=[NEW_TOKENS] * 4)
        until_preempted(generator, factory)
        waiting = [entry[0] for entry in generator._unprocessed_sequences]
        assert waiting == sorted(waiting)
        cache, tokens = generator.extract_cache([waiting[0]])[waiting[0]]
        assert cache[0].size() == len(tokens)
        assert generator.remove([waiting[0]], return_prompt_caches=True)
        left = [uid for uid in uids if uid != waiting[0]]
        runs = runs_of(generator, left)
        assert all(run.tokens for run in runs)
        del cache
    assert_nothing_is_used(factory)


def test_a_sequence_whose_prompt_is_half_computed_can_be_preempted() -> None:
    model = small_model("qwen3")
    # The first one needs a second block after 41 of the 50 steps of the other one's prompt.
    prompts = [PROMPTS[0][:216], [5, *PROMPTS[0] * 2]]
    large, small = PagedCacheFactory(model, max_bytes=LARGE), factory_of_blocks(model, 3)
    runs = []
    for factory in (large, small):
        with factory:
            generator = generator_of(model, prefill_step_size=10)
            first = generator.insert(prompts[:1], max_tokens=[60])
            assert len(generator.next_generated()) == 1
            second = generator.insert(prompts[1:], max_tokens=[3])
            runs.append(runs_of(generator, [*first, *second]))
    assert_same_runs(runs[1], runs[0], TOLERANCE)
    assert (large.stats().preemptions, small.stats().preemptions) == (0, 1)
    assert_nothing_is_used(large, small)


def test_what_nothing_could_compute_again_is_not_preempted() -> None:
    """The caches hold tokens that BatchGenerator was not told."""
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 4)
    with factory:
        caches = [factory.make_cache() for _ in range(4)]
        for cache in caches:
            model(mx.array([PROMPTS[1]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        generator = generator_of(model)
        generator.insert([[7]] * 4, max_tokens=[NEW_TOKENS] * 4, caches=caches)
        caches.clear()
        with pytest.raises(PoolExhausted):
            runs_of(generator, [0, 1, 2, 3])
        assert factory.stats().preemptions == 0
        generator.remove([0, 1, 2, 3])
    del cache
    assert_nothing_is_used(factory)


def test_a_sequence_too_long_for_the_pool_is_told_and_the_rest_continues() -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 2)
    with factory:
        generator = generator_of(model)
        long, short = generator.insert([PROMPTS[1] * 2, PROMPTS[1]], max_tokens=[60, 20])
        with pytest.raises(PoolExhausted):
            runs_of(generator, [long, short])
        generator.remove([long])
        (run,) = runs_of(generator, [short])
        assert len(run.tokens) == 20
    assert_nothing_is_used(factory)


def test_the_last_of_those_that_share_a_page_needs_no_other() -> None:
    """Three begin in one page that is partly filled, and three pages hold them all."""
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 3)
    with factory:
        cache = factory.make_cache()
        mx.eval(model(mx.array([PROMPTS[0][:100]]), cache=cache))
        caches = [copy.deepcopy(cache) for _ in range(3)]
        del cache
        generator = generator_of(model)
        uids = generator.insert([[1], [2], [3]], max_tokens=[40] * 3, caches=caches)
        caches.clear()
        assert not any(each.growth.owns_last_page for each in Line(generator))
        generator.next()
        assert running_uids(generator) == uids
        assert factory.stats().blocks_used == 3
        runs_of(generator, uids)
    assert factory.stats().preemptions == 0


def test_without_a_factory_mlx_lms_generator_is_its_own() -> None:
    model = small_model("qwen3")
    generator = generator_of(model)
    generator.insert([PROMPTS[0]], max_tokens=[1])
    assert "_next" not in vars(generator)


def test_the_worst_priority_is_preempted_first_whoever_came_first() -> None:
    model = small_model("qwen3")
    large, small = PagedCacheFactory(model, max_bytes=LARGE), factory_of_blocks(model, 5)
    expected = served(large, model)
    with small:
        generator: Any = generator_of(model)
        uids = generator.insert(PROMPTS, max_tokens=[NEW_TOKENS] * 4)
        attached = attach(generator, small)
        assert attached is not None
        attached.priorities.by_uid.update({uids[0]: 5, uids[1]: -5})
        given: dict[int, list[Any]] = {uid: [] for uid in uids}
        order: list[int] = []
        while responses := generator.next_generated():
            for response in responses:
                response.prompt_cache = None
                given[response.uid].append(response)
                if response.finish_reason is not None:
                    order.append(uids.index(response.uid))
    assert order == [1, 2, 3, 0]
    runs = [
        Run([each.token for each in its], mx.stack([each.logprobs for each in its]))
        for its in given.values()
    ]
    assert_same_runs(runs, expected, TOLERANCE)
    assert small.stats().preemptions > 0


def test_sequences_make_way_for_one_of_a_better_priority_if_that_is_enough() -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 4)
    large = PagedCacheFactory(model, max_bytes=LARGE)
    expected = served(large, model, prompts=PROMPTS[:2])
    with factory:
        generator: Any = generator_of(model)
        uids = generator.insert(PROMPTS[:2], max_tokens=[NEW_TOKENS] * 2)
        given: dict[int, list[Any]] = {uid: [] for uid in uids}

        def step() -> None:
            for response in generator.next_generated():
                response.prompt_cache = None
                given[response.uid].append(response)

        while min(map(len, given.values())) < 15:
            step()
        preemption = generator.paged_kv_preemption
        preemption.priorities.by_uid.update(dict.fromkeys(uids, 5))
        block = pool_size(factory.pool).bytes_for(1)
        assert factory.stats().blocks_used == 4
        # Not for one that is no better, nor for one that would not fit all the same.
        assert not preemption.can_begin(2 * block, 5)
        assert not preemption.can_begin(5 * block, 0)
        assert factory.stats().preemptions == 0
        # Nor before they have generated.
        preemption._scheduler._returned = set(uids)
        assert not preemption.can_begin(2 * block, 0)
        preemption._scheduler._returned = set()
        assert preemption.can_begin(2 * block, 0)
        assert set(_preempted(generator)) == {uids[1]}
        # Nobody passes one that waits and is as good.
        assert not preemption.can_begin(0, 5)
        while len(given[uids[0]]) < NEW_TOKENS or len(given[uids[1]]) < NEW_TOKENS:
            step()
    runs = [
        Run([each.token for each in its], mx.stack([each.logprobs for each in its]))
        for its in given.values()
    ]
    assert_same_runs(runs, expected, TOLERANCE)
