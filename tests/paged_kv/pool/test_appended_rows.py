"""Layers that append rows at rates of their own: their pages hold what mlx-lm's caches hold."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory, PoolExhausted
from paged_kv.allocator.errors import RollbackError
from paged_kv.kernels.pages.layer_memory import LazyReads
from tests.support.generation import (
    Run,
    assert_nothing_is_used,
    assert_same_run,
    assert_same_runs,
    greedy,
    runs_of,
)
from tests.support.zoo import small_model

TOLERANCE = 1e-4
TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(700)]
# Layer 2 reads the rows of layer 1, and the last layer chooses its own.
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 3,
}
RATES: dict[str, dict[str, Any]] = {
    # The native kernels take shares of 8 and more numbers.
    "4 and 1": {"compress_ratios": [0, 4, 4, 1], "head_dim": 64, "index_head_dim": 64},
    # A token's share of a row of 32 numbers is less than one number.
    "128 and 2": {"compress_ratios": [0, 128, 128, 2]},
}


def random_model(rates: str) -> Any:
    """deepseek_v41, of which mlx-lm's own caches can neither be batched nor trimmed."""
    return small_model("deepseek_v41", **LAYERS, **RATES[rates])


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("4 and 1")


@pytest.fixture
def factory(model: Any) -> Iterator[PagedCacheFactory]:
    factory = PagedCacheFactory(model, max_bytes="64MB")
    yield factory
    factory.clear()
    assert_nothing_is_used(factory)


def alone(model: Any, prompt: list[int], count: int = 2, step: int = 2048) -> Run:
    """What mlx-lm's own caches give."""
    return greedy(model, prompt, make_prompt_cache(model), count, step)


def computed(model: Any, tokens: list[int], cache: list[Any]) -> list[Any]:
    """The prompt cache, once it holds these tokens too."""
    model(mx.array([tokens]), cache=cache)
    return cache


def filled(model: Any, factory: PagedCacheFactory, tokens: list[int]) -> list[Any]:
    """A prompt cache that holds these tokens."""
    return computed(model, tokens, factory.make_cache())


def assert_goes_on(model: Any, ours: Any, held: list[list[int]], then: list[int]) -> None:
    """As mlx-lm's cache does after the same steps: sums of other steps have another order."""
    stock = make_prompt_cache(model)
    for tokens in held:
        computed(model, tokens, stock)
    assert_same_run(greedy(model, then, ours, 2), greedy(model, then, stock, 2), TOLERANCE)


@pytest.mark.parametrize(
    ("rates", "step"),
    [("4 and 1", 64), pytest.param("128 and 2", 2048, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_tokens_are_those_of_mlx_lm(rates: str, step: int) -> None:
    """Prompts that end within a group, a window and a page, and behind each."""
    model = random_model(rates)
    factory = PagedCacheFactory(model, max_bytes="64MB")
    for length in (1, 3, 4, 31, 33, 255, 257) if step == 2048 else (33,):
        ours = greedy(model, TEXT[:length], factory.make_cache(), 4, step)
        assert_same_run(ours, alone(model, TEXT[:length], 4, step), TOLERANCE)
    assert factory.stats().gather_fallbacks == 0
    assert_nothing_is_used(factory)


def test_a_step_gathers_only_the_rows_that_the_model_reads(
    model: Any, factory: PagedCacheFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(model, factory, TEXT[:300])
    gathered: list[mx.array] = []
    leave = LazyReads.leave

    def noted(self: LazyReads, arrays: tuple[mx.array, ...], *place: Any) -> None:
        gathered.extend(arrays)
        leave(self, arrays, *place)

    monkeypatch.setattr(LazyReads, "leave", noted)
    mx.eval(model(mx.array([[5]]), cache=cache))
    gc.collect()
    layers = sum(rows.rate > 1 for rows in factory.pool.rows.values())
    # A layer that chooses rows scores its whole index: keys and values of that alone.
    assert len([each for each in gathered if each.shape[2] == 301]) <= 2 * layers
    last = max(at for at, rows in factory.pool.rows.items() if rows.name == "compress_kv")
    chosen = factory.pool.group_of(last).pages[last].lazy_reads.waiting()
    assert max(each.shape[2] for each in chosen) == 8


@pytest.mark.slow
def test_forks_and_saved_caches_go_on_by_themselves(
    model: Any, factory: PagedCacheFactory, tmp_path: Path
) -> None:
    """From within a group."""
    cache = filled(model, factory, TEXT[:302])
    used = factory.stats().blocks_used
    fork = copy.deepcopy(cache)
    assert factory.stats().blocks_used == used
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    for each, then in ((cache, TEXT[302:305]), (fork, TEXT[600:606]), (loaded, TEXT[602:605])):
        assert_goes_on(model, each, [TEXT[:302]], then)


@pytest.mark.slow
def test_trimmed_tokens_are_forgotten(model: Any, factory: PagedCacheFactory) -> None:
    """Groups that were closed are open again, which mlx-lm's cache cannot do."""
    steps = [TEXT[:262], *([token] for token in TEXT[262:270])]
    cache = factory.make_cache()
    for tokens in steps:
        computed(model, tokens, cache)
    assert all(each.is_trimmable() for each in cache)
    assert {each.trim(5) for each in cache} == {5}
    assert cache[0].offset == 265
    assert_goes_on(model, cache, steps[:-5], TEXT[600:603])


def test_a_trim_that_needs_what_was_overwritten_changes_nothing(
    model: Any, factory: PagedCacheFactory
) -> None:
    """By the ring first; then within a group whose inputs are not kept, behind a cached prefix."""
    factory.insert_cache(TEXT[:276], filled(model, factory, TEXT[:276]))
    cache, cached = factory.fetch_cache(TEXT[:278])
    assert cached == 276
    computed(model, TEXT[276:278], cache)
    for count in (3, 5, 200):
        with pytest.raises(RollbackError):
            cache[0].trim(count)
        with pytest.raises(RollbackError):
            cache[1].trim(count)
    assert {int(each.offset) for each in cache} == {278}
    # No group is open there.
    assert {each.trim(6) for each in cache} == {6}
    ours = greedy(model, TEXT[600:603], cache, 2)
    assert_same_run(ours, alone(model, [*TEXT[:272], *TEXT[600:603]]), TOLERANCE)


@pytest.mark.slow
def test_ragged_batches_have_the_tokens_of_their_prompts_alone(
    model: Any, factory: PagedCacheFactory
) -> None:
    """Two join later. mlx-lm cannot batch this model."""
    prompts = [TEXT[5:45], TEXT[:3], TEXT[9:10], TEXT[2:142]]
    generator = BatchGenerator(
        model, max_tokens=5, prefill_step_size=16, prefill_batch_size=2, completion_batch_size=3
    )
    uids = generator.insert(
        [list(each) for each in prompts], caches=[factory.make_cache() for _ in prompts]
    )
    runs = runs_of(generator, uids)
    assert_same_runs(runs, [alone(model, each, 5, 16) for each in prompts], TOLERANCE)


@pytest.mark.slow
def test_a_new_cache_takes_a_batch(model: Any, factory: PagedCacheFactory) -> None:
    cache = factory.make_cache()
    rows = TEXT[:18], TEXT[20:38]
    logits = model(mx.array(rows), cache=cache)
    assert cache[0].offset.tolist() == [18, 18]
    for row, tokens in enumerate(rows):
        expected = model(mx.array([tokens]), cache=make_prompt_cache(model))
        assert mx.allclose(logits[row], expected[0], atol=TOLERANCE)
        assert_goes_on(model, [each.extract(row) for each in cache], [tokens], [3])


def test_a_batch_keeps_what_its_sequences_depend_on(
    model: Any, factory: PagedCacheFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's rank lets its cache depend on what it sends."""
    stock = type(model.model).__call__

    def call(text_model: Any, inputs: mx.array, cache: list[Any]) -> mx.array:
        output: mx.array = stock(text_model, inputs, cache)
        cache[-1].window = mx.depends(cache[-1].window, mx.zeros(1))
        return output

    monkeypatch.setattr(type(model.model), "__call__", call)
    cache = factory.make_cache()
    model(mx.array([TEXT[:5], TEXT[5:10]]), cache=cache)
    assert [at for at in range(4) if cache[at].caches[0].dependency is not None] == [3]


@pytest.mark.slow
def test_prompts_share_pages_up_to_the_last_closed_group(model: Any, tmp_path: Path) -> None:
    """Within a page too, and a store gives full pages back."""
    factory = PagedCacheFactory(model, max_bytes="64MB", store=tmp_path)
    # Only such a cache keeps the window of a full page.
    first = computed(model, TEXT[:270], factory.fetch_cache(TEXT[:270])[0])
    assert factory.insert_cache(TEXT[:270], first) == 268
    for length, known in {270: 268, 267: 264, 256: 252, 4: 0}.items():
        assert factory.fetch_cache(TEXT[:length])[1] == known
    used = factory.stats().blocks_used
    expected = alone(model, TEXT[:280])
    for at_least in (268, 256):
        cache, cached = factory.fetch_cache(TEXT[:280])
        assert at_least <= cached <= 268
        if at_least == 268:
            assert factory.stats().blocks_used == used
        assert_same_run(greedy(model, TEXT[cached:280], cache, 2), expected, TOLERANCE)
        factory.close()
        factory = PagedCacheFactory(model, max_bytes="64MB", store=tmp_path)
    factory.close()


def short_factory(model: Any, blocks: int) -> PagedCacheFactory:
    probe = PagedCacheFactory(model, max_bytes="64MB")
    assert probe.can_admit(1)
    needed = sum(group.size.block_bytes for group in probe.pool.groups)
    return PagedCacheFactory(model, max_bytes=blocks * needed)


@pytest.mark.slow
def test_a_step_that_does_not_fit_leaves_the_sequence_where_it_was(model: Any) -> None:
    factory = short_factory(model, 2)
    cache = filled(model, factory, TEXT[:254])
    blocker = filled(model, factory, TEXT[:200])
    with pytest.raises(PoolExhausted):
        model(mx.array([TEXT[254:258]]), cache=cache)
    assert cache[1].pending_kv.shape == (1, 2, 64)
    del blocker
    assert_goes_on(model, cache, [TEXT[:254]], TEXT[254:258])


def test_a_step_that_fails_in_a_later_layer_leaves_open_groups_as_they_were(
    model: Any, factory: PagedCacheFactory
) -> None:
    cache = filled(model, factory, TEXT[:6])
    before = cache[1].pending_kv
    row = mx.ones((1, 1, 64))
    for layer in cache[:2]:
        layer.update_window(row)
    for name in ("pending_kv", "pending_gate"):
        setattr(cache[1], name, mx.concatenate([getattr(cache[1], name), row], axis=1))
    assert cache[1].pending_kv.shape == (1, 3, 64)
    with pytest.raises(ValueError, match="layer 4"):
        cache[2].update_window(row.astype(mx.float16))
    assert cache[0].offset == 6
    assert mx.array_equal(cache[1].pending_kv, before)
    assert_goes_on(model, cache, [TEXT[:6]], TEXT[6:9])
