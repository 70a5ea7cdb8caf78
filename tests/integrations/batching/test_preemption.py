"""A preempted sequence gets the tokens that it would have got, and no step exhausts a pool."""

import copy
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, StopSequences

from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.preemption import Preemption
from paged_kv.integrations.batching.rows import Request, WaitingQueue, running_uids
from paged_kv.pool.options import FormatChoice
from paged_kv.prefix.keeping import Rates, inner_salt
from paged_kv.server.engine.sampling import RandomSampler
from tests.support.generation import Run, assert_nothing_is_used, assert_same_runs, runs_of
from tests.support.zoo import small_model

TOLERANCE = 2e-3
# Each needs two blocks for its prompt, and soon a third, which is not promised at its beginning.
NEW_TOKENS = 45
LENGTHS = (478, 473, 479, 475)
PROMPTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
LARGE = 256 << 20


def factory_of_blocks(
    model: Any, blocks: float, page_format: FormatChoice = "fp16", **options: Any
) -> PagedCacheFactory:
    """With memory for so many blocks in each group of layers."""
    probe = PagedCacheFactory(model, max_bytes=LARGE, page_format=page_format)
    assert probe.can_admit(1)
    block_bytes = sum(group.size.written_bytes for group in probe.pool.groups)
    most = int(blocks * block_bytes)
    return PagedCacheFactory(model, max_bytes=most, page_format=page_format, **options)


def generator_of(model: Any, **options: Any) -> BatchGenerator:
    defaults = {"completion_batch_size": 8, "prefill_batch_size": 4, "prefill_step_size": 240}
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


@cache
def undisturbed(
    make_options: Callable[[], dict[str, Any]] = dict, name: str = "qwen3"
) -> list[Run]:
    """What all prompts give in a pool that holds them."""
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=LARGE)
    runs = served(factory, model, make_options)
    assert factory.stats().preemptions == 0
    return runs


class Noted:
    """What a generator gives to each sequence, and the order in which they end."""

    def __init__(self, generator: Any, uids: list[int]) -> None:
        self.generator = generator
        self.given: dict[int, list[Any]] = {uid: [] for uid in uids}
        self.ended: list[int] = []

    def step(self) -> bool:
        responses = self.generator.next_generated()
        for response in responses:
            response.prompt_cache = None
            self.given[response.uid].append(response)
            if response.finish_reason is not None:
                self.ended.append(response.uid)
        return bool(responses)

    def runs(self) -> list[Run]:
        return [
            Run([each.token for each in its], mx.stack([each.logprobs for each in its]))
            for its in self.given.values()
        ]


def assert_equal_under_pressure(
    name: str = "qwen3", make_options: Callable[[], dict[str, Any]] = dict, blocks: float = 9
) -> PagedCacheFactory:
    """Returns the factory with the small pool; all need 12 blocks."""
    model = small_model(name)
    small = factory_of_blocks(model, blocks)
    expected = undisturbed(make_options, name)
    assert_same_runs(served(small, model, make_options), expected, TOLERANCE)
    stats = small.stats()
    assert stats.preemptions > 0
    # What a preempted sequence finds of itself is no other prompt's.
    assert (stats.prefix_queries, stats.prefix_hits) == (sum(LENGTHS), 0)
    assert_nothing_is_used(small)
    return small


def longer() -> dict[str, Any]:
    return {"max_tokens": [150] * len(PROMPTS)}


@pytest.mark.slow
def test_texts_with_windows_are_equal() -> None:
    """Rings do not grow: only full layers run out of pages."""
    assert_equal_under_pressure("gemma3_text", longer, blocks=5.75)


def seeded() -> dict[str, Any]:
    class Options:
        temperature, top_p, top_k, min_p = 1.0, 0.9, 4, 0.0
        xtc_probability, xtc_threshold = 0.0, 0.0

    options: Any = Options()
    return {"samplers": [RandomSampler(options, [], seed) for seed in range(len(PROMPTS))]}


@pytest.mark.slow
@pytest.mark.parametrize("is_quick", [True, False])
def test_what_is_evicted_is_read_again_if_that_is_quicker(
    is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("qwen3")
    monkeypatch.setattr(Rates, "is_reading_quicker", lambda *_: is_quick)
    factory = factory_of_blocks(model, 8, store=tmp_path / "pages")
    store = factory.store
    assert store is not None
    # On a busy machine pages would be wanted before they are written.
    offers = store.offers
    monkeypatch.setattr(store, "offers", lambda *wanted: offers(*wanted) if store.flush() else [])
    assert_same_runs(served(factory, model), undisturbed(), TOLERANCE)
    stats = factory.stats()
    assert stats.preemptions > 0
    assert (stats.tokens_reread > 0) == is_quick
    assert stats.tokens_reread <= stats.tokens_read
    assert factory.prefixes.rates.computing.seconds_for(1)
    factory.close()


@pytest.mark.slow
@pytest.mark.parametrize("page_format", ["q4", pytest.param("q8", marks=pytest.mark.soak)])
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
        seems_full = len(running) > 1 and next(steps) in (5, 20, 36)
        return not seems_full and reserve(preemption, running)

    monkeypatch.setattr(Preemption, "reserve", reserve_or_not)
    assert_same_runs(served(small, model), expected, TOLERANCE)
    assert small.stats().preemptions > 0
    assert_nothing_is_used(large, small)


def until_preempted(generator: BatchGenerator, factory: PagedCacheFactory) -> None:
    while not factory.stats().preemptions:
        assert generator.next_generated()


@pytest.mark.slow
def test_a_stop_word_matches_across_a_preemption() -> None:
    """Of its two tokens the first came before the preemption, and the second after it."""
    model = small_model("qwen3")
    whole = undisturbed(seeded)
    factory = factory_of_blocks(model, 9)
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


def test_a_preempted_sequences_pages_are_its_sessions_and_keep_its_salt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 9)
    with factory:
        generator: Any = generator_of(model)
        uids = generator.insert(PROMPTS, max_tokens=[NEW_TOKENS] * 4)
        preemption = generator.paged_kv_preemption
        preemption.requests.update(
            {uid: Request(salt="a user's", session=f"chat {uid}") for uid in uids}
        )
        until_preempted(generator, factory)
        returning = list(_preempted(generator))
        prompt = PROMPTS[uids.index(returning[0])]
        assert factory.fetch_cache(prompt)[1] == 0
        assert factory.fetch_cache(prompt, salt="a user's")[1] > 0
        assert factory.end_session(f"chat {returning[0]}", salt="a user's") > 0
        assert factory.fetch_cache(prompt, salt="a user's")[1] == 0
        generator.remove([uid for uid in uids if uid not in returning])
        fetch, salts = factory.fetch_cache, []

        def noted(*arguments: Any, **options: Any) -> Any:
            salts.append(inner_salt(options.get("salt")))
            return fetch(*arguments, **options)

        monkeypatch.setattr(factory, "fetch_cache", noted)
        generator.next()
        assert set(salts) == {"a user's"}
        # Those of the others have ended with them.
        assert list(preemption.requests) == returning
        generator.remove(returning)
        generator.insert(PROMPTS[:1], max_tokens=[1])
        generator.next()
        assert not preemption.requests


def test_the_last_of_those_that_share_a_page_needs_no_other() -> None:
    """Three begin in one page that is partly filled, and three pages hold them all."""
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 3)
    with factory:
        first = factory.make_cache()
        mx.eval(model(mx.array([PROMPTS[0][:100]]), cache=first))
        caches = [copy.deepcopy(first) for _ in range(3)]
        del first
        generator = generator_of(model)
        uids = generator.insert([[1], [2], [3]], max_tokens=[40] * 3, caches=caches)
        caches.clear()
        assert not any(each.growth.owns_last_page for each in WaitingQueue(generator, int))
        generator.next()
        assert running_uids(generator) == uids
        assert factory.stats().blocks_used == 3
        runs_of(generator, uids)
    assert factory.stats().preemptions == 0


def test_sequences_make_way_for_one_of_a_better_priority() -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 6)
    with factory:
        generator: Any = generator_of(model)
        uids = generator.insert(PROMPTS[:2], max_tokens=[NEW_TOKENS] * 2)
        noted = Noted(generator, uids)
        while min(map(len, noted.given.values())) < 42:
            noted.step()
        preemption = generator.paged_kv_preemption
        preemption.requests.update(dict.fromkeys(uids, Request(priority=5)))
        assert factory.stats().blocks_used == 6

        def preempted_for(priority: int) -> set[int]:
            """The sequences that make way for one that takes two blocks."""
            new = [list(range(1, 400))]
            (uid,) = generator.insert_segments([new], [1], caches=[factory.make_cache()])
            preemption.requests[uid] = Request(priority)
            preemption.begin_later(uid)
            noted.given[uid] = []
            noted.step()
            generator.remove([uid])
            del noted.given[uid]
            return set(_preempted(generator))

        assert not preempted_for(5)
        assert preempted_for(0) == {uids[1]}
        while len(noted.ended) < 2:
            noted.step()
    assert_same_runs(noted.runs(), undisturbed()[:2], TOLERANCE)
