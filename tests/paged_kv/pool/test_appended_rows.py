"""Layers that append rows at rates of their own: their pages hold what mlx-lm's caches hold."""

import copy
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory, PoolExhausted, SpeculativeBatchGenerator
from paged_kv.allocator.errors import RollbackError
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.states.growing_layers import growing_layers
from paged_kv.kernels.pages.lazy_reads import LazyReads
from paged_kv.pool.appended_rows import AppendedRows
from tests.support.drafts import PlannedDraft
from tests.support.generation import (
    Run,
    assert_nothing_is_used,
    assert_same_run,
    assert_same_runs,
    greedy,
    runs_of,
)
from tests.support.grids import plain_cases, plain_only
from tests.support.zoo import small_model

TOLERANCE = 1e-4
TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(1400)]
RATES: dict[str, dict[str, Any]] = {
    "2 and 1": {},
    # The native kernels take shares of 8 and more numbers.
    "4 and 1": {"compress_ratios": [0, 4, 4, 4, 1, 1], "head_dim": 64, "index_head_dim": 64},
    # A token's share of a row of 32 numbers is less than one number.
    "128 and 2": {"compress_ratios": [0, 128, 128, 128, 2, 2]},
}


def random_model(**changes: Any) -> Any:
    """deepseek_v41, of which mlx-lm's own caches can neither be batched nor trimmed."""
    return small_model("deepseek_v41", **changes)


@pytest.fixture
def model() -> Any:
    return random_model(**RATES["4 and 1"])


@pytest.fixture
def factory(model: Any) -> Iterator[PagedCacheFactory]:
    factory = PagedCacheFactory(model, max_bytes="64MB")
    yield factory
    factory.clear()
    assert_nothing_is_used(factory)


def alone(model: Any, prompt: list[int], count: int = 8, step: int = 2048) -> Run:
    """What mlx-lm's own caches give."""
    return greedy(model, prompt, make_prompt_cache(model), count, step)


def filled(model: Any, factory: PagedCacheFactory, tokens: list[int]) -> list[Any]:
    """A prompt cache that holds these tokens."""
    cache = factory.make_cache()
    model(mx.array([tokens]), cache=cache)
    return cache


def step_by_step(model: Any, tokens: list[int], cache: Any, first: int) -> None:
    """Compute the first tokens together, and then each by itself."""
    model(mx.array([tokens[:first]]), cache=cache)
    for token in tokens[first:]:
        mx.eval(model(mx.array([[token]]), cache=cache))


@pytest.mark.parametrize("rates", plain_only(["4 and 1", "128 and 2"], RATES))
@pytest.mark.parametrize("step", plain_only([2048, 7], [2048, 64, 7]))
def test_tokens_are_those_of_mlx_lm(rates: str, step: int) -> None:
    """Prompts that end within a group, a window and a page, and behind each."""
    model = random_model(**RATES[rates])
    factory = PagedCacheFactory(model, max_bytes="64MB")
    for length in (1, 3, 4, 31, 33, 255, 257, 300):
        ours = greedy(model, TEXT[:length], factory.make_cache(), 8, step)
        assert_same_run(ours, alone(model, TEXT[:length], step=step), TOLERANCE)
    assert factory.stats().gather_fallbacks == 0
    assert_nothing_is_used(factory)


def test_what_a_cache_appends_is_found_without_its_name(model: Any) -> None:
    """And so are the tokens of a group and the numbers of a row."""
    parts = growing_layers(model, make_prompt_cache(model))
    assert [[(each.rows.name, each.rows.rate) for each in layer] for layer in parts] == [
        [("window", 1)],
        [("window", 1), ("compress_kv", 4), ("index_k", 4)],
        [("window", 1)],
        [("window", 1)],
        [("window", 1), ("compress_kv", 1), ("index_k", 1)],
        [("window", 1)],
    ]
    rows = parts[1][1].rows
    assert [each.name for each in rows.inputs] == ["pending_kv", "pending_gate"]
    assert (rows.dim, parts[1][0].window) == (64, 32)
    assert growing_layers(small_model("llama"), make_prompt_cache(small_model("llama"))) == []


def test_a_cache_that_grows_in_another_way_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = type(make_prompt_cache(model)[0]).update_window

    def update_window(cache: Any, rows: mx.array) -> mx.array:
        cache.squares = mx.zeros((1, rows.shape[1] ** 2, 3))
        window: mx.array = stock(cache, rows)
        return window

    monkeypatch.setattr(type(make_prompt_cache(model)[0]), "update_window", update_window)
    with pytest.raises(TypeError, match=r"LayerCache keeps .*squares .* does not know how these"):
        PagedCacheFactory(model)


@pytest.mark.parametrize("rate", [1, 4, 64, 256])
def test_shares_of_rows_are_put_together_again(rate: int) -> None:
    layout = AppendedRows("rows", rate, 48, mx.float32)
    rows = mx.random.normal((1, 3, 48))
    keys, values = layout.shares(rows)
    assert keys.shape == values.shape == (1, 1, 3 * rate, layout.geometry.k_dim)
    assert mx.array_equal(layout.rows(keys, values), rows)


def test_a_page_holds_rows_as_they_are(model: Any, factory: PagedCacheFactory) -> None:
    cache, stock = filled(model, factory, TEXT[:530]), make_prompt_cache(model)
    model(mx.array([TEXT[:530]]), cache=stock)
    for ours, theirs in zip(cache, stock, strict=True):
        assert ours.offset == theirs.offset == 530
        # The window here ends before the next token, which sees itself too.
        assert mx.array_equal(ours.window, theirs.window[:, 1:])
        if theirs.compress_kv is not None:
            assert mx.array_equal(ours.compress_kv, theirs.compress_kv)
            assert mx.array_equal(ours.index_k, theirs.index_k)
        if theirs.pending_kv is not None:
            assert mx.array_equal(ours.pending_kv, theirs.pending_kv)
    del ours


def test_rows_grow_without_copies_and_within_what_their_tokens_need(
    model: Any, factory: PagedCacheFactory
) -> None:
    cache = filled(model, factory, TEXT[:1300])
    stock = make_prompt_cache(model)
    model(mx.array([TEXT[:1300]]), cache=stock)
    rows = sum(
        each.nbytes for layer in stock for each in (layer.compress_kv, layer.index_k)
        if each is not None
    )  # fmt: skip
    ring, shared = sorted(factory.pool.groups, key=lambda group: group.window is None)
    assert shared.block_bytes * 1300 == rows * 256
    assert shared.allocator.num_used == -(-1300 // 256)
    assert ring.allocator.num_used == 1
    moves = shared.moves
    greedy(model, TEXT[1300:1302], cache, 40)
    assert shared.moves - moves <= 1


def test_a_step_gathers_only_the_rows_that_the_model_chooses(
    model: Any, factory: PagedCacheFactory
) -> None:
    cache = filled(model, factory, TEXT[:300])
    mx.eval(model(mx.array([[5]]), cache=cache))
    names = {
        rows.name: factory.pool.group_of(at).pages[at] for at, rows in factory.pool.rows.items()
    }
    gathered = [each.shape[2] for each in names["compress_kv"].lazy_reads.waiting()]
    assert gathered
    assert max(gathered) == 8
    assert max(each.shape[2] for each in names["index_k"].lazy_reads.waiting()) == 301


def test_rows_that_a_model_only_appends_to_are_not_gathered(
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


@pytest.mark.parametrize("length", [300, 1028])
def test_a_fork_shares_pages_until_one_of_the_two_writes(
    model: Any, factory: PagedCacheFactory, length: int
) -> None:
    cache = filled(model, factory, TEXT[:length])
    used = factory.stats().blocks_used
    fork = copy.deepcopy(cache)
    assert factory.stats().blocks_used == used
    ends = [TEXT[length : length + 3], TEXT[900:906]]
    for each, tokens in zip((cache, fork), ends, strict=True):
        ours = greedy(model, tokens, each, 8)
        # The same steps, whose sums are in the same order.
        stock = make_prompt_cache(model)
        model(mx.array([TEXT[:length]]), cache=stock)
        assert_same_run(ours, greedy(model, tokens, stock, 8), TOLERANCE)


@pytest.mark.parametrize(
    ("length", "count"), plain_cases([(532, 5)], itertools.product([77, 532], [1, 2, 5, 31]))
)
def test_trimmed_tokens_are_forgotten(
    model: Any, factory: PagedCacheFactory, length: int, count: int
) -> None:
    """Groups that were closed are open again, which mlx-lm's cache cannot do."""
    cache, stock = factory.make_cache(), make_prompt_cache(model)
    step_by_step(model, TEXT[:length], cache, length - 40)
    assert all(each.is_trimmable() for each in cache)
    assert {each.trim(count) for each in cache} == {count}
    assert cache[0].offset == length - count
    step_by_step(model, TEXT[: length - count], stock, length - 40)
    ours = greedy(model, TEXT[700:703], cache, 8)
    assert_same_run(ours, greedy(model, TEXT[700:703], stock, 8), TOLERANCE)


def test_a_trim_that_needs_what_was_overwritten_changes_nothing(
    model: Any, factory: PagedCacheFactory
) -> None:
    """By the ring first; then within a group whose inputs are not kept, behind a cached prefix."""
    factory.insert_cache(TEXT[:532], filled(model, factory, TEXT[:532]))
    cache, cached = factory.fetch_cache(TEXT[:534])
    assert cached == 532
    model(mx.array([TEXT[532:534]]), cache=cache)
    for count in (3, 5, 400):
        with pytest.raises(RollbackError):
            cache[0].trim(count)
        with pytest.raises(RollbackError):
            cache[1].trim(count)
    assert {int(each.offset) for each in cache} == {534}
    # No group is open there.
    assert {each.trim(6) for each in cache} == {6}
    ours = greedy(model, TEXT[600:603], cache, 8)
    assert_same_run(ours, alone(model, [*TEXT[:528], *TEXT[600:603]]), TOLERANCE)


@pytest.mark.parametrize("prefill", plain_only([16], [16, 300]))
def test_ragged_batches_have_the_tokens_of_their_prompts_alone(
    model: Any, factory: PagedCacheFactory, prefill: int
) -> None:
    """Two join later. mlx-lm cannot batch this model."""
    prompts = [TEXT[5:75], TEXT[:3], TEXT[9:10], TEXT[2:342]]
    generator = BatchGenerator(
        model,
        max_tokens=12,
        prefill_step_size=prefill,
        prefill_batch_size=2,
        completion_batch_size=3,
    )
    uids = generator.insert(
        [list(each) for each in prompts], caches=[factory.make_cache() for _ in prompts]
    )
    runs = runs_of(generator, uids)
    stock = [alone(model, each, 12, prefill) for each in prompts]
    assert_same_runs(runs, stock, TOLERANCE)


def test_a_new_cache_takes_a_batch(model: Any, factory: PagedCacheFactory) -> None:
    cache = factory.make_cache()
    logits = model(mx.array([TEXT[:20], TEXT[20:40]]), cache=cache)
    assert cache[0].offset.tolist() == [20, 20]
    for row, tokens in enumerate((TEXT[:20], TEXT[20:40])):
        expected = model(mx.array([tokens]), cache=make_prompt_cache(model))
        assert mx.allclose(logits[row], expected[0], atol=TOLERANCE)
        one = [each.extract(row) for each in cache]
        assert_same_run(
            greedy(model, [3], one, 6), alone(model, [*tokens, 3], 6), TOLERANCE
        )  # fmt: skip


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
    assert [each.caches[0].has_dependency for each in cache] == [*[False] * 5, True]


def test_rejected_drafts_are_rolled_back(model: Any, factory: PagedCacheFactory) -> None:
    prompts = [TEXT[:9], TEXT[3:60], TEXT[7:8]]
    texts = [[*each, *alone(model, each, 60).tokens] for each in prompts]
    generator = SpeculativeBatchGenerator(
        model,
        PlannedDraft(texts, lengths=(0, 3, 1, 4, 6), wrong_every=5),
        lengths=FixedLengths(),
        max_tokens=50,
    )
    runs = runs_of(
        generator, generator.insert(prompts, caches=[factory.make_cache() for _ in prompts])
    )
    for run, text, prompt in zip(runs, texts, prompts, strict=True):
        assert run.tokens == text[len(prompt) : len(prompt) + 50]


def test_prompts_share_pages_up_to_the_last_closed_group(
    model: Any, factory: PagedCacheFactory
) -> None:
    """Under their salt, within a page too, and where a prompt parts from another."""
    cache = filled(model, factory, TEXT[:530])
    assert factory.insert_cache(TEXT[:530], cache, salt="alice") == 528
    finds = {530: 528, 527: 524, 512: 508, 4: 0}
    for length, known in finds.items():
        assert factory.fetch_cache(TEXT[:length], salt="alice")[1] == known
    assert factory.fetch_cache(TEXT[:530], salt="bob")[1] == 0
    used = factory.stats().blocks_used
    resumed, cached = factory.fetch_cache(TEXT[:600], salt="alice")
    assert (cached, factory.stats().blocks_used) == (528, used)
    assert_same_run(
        greedy(model, TEXT[528:600], resumed, 8),
        alone(model, TEXT[:600]), TOLERANCE
    )  # fmt: skip


def test_a_store_gives_pages_back(model: Any, tmp_path: Path) -> None:
    factory = PagedCacheFactory(model, max_bytes="64MB", store=tmp_path)
    factory.insert_cache(TEXT[:700], filled(model, factory, TEXT[:700]))
    factory.close()
    factory = PagedCacheFactory(model, max_bytes="64MB", store=tmp_path)
    cache, cached = factory.fetch_cache(TEXT[:700])
    assert 512 <= cached <= 696
    ours = greedy(model, TEXT[cached:700], cache, 8)
    assert_same_run(ours, alone(model, TEXT[:700]), TOLERANCE)
    factory.close()


@pytest.mark.parametrize("length", [50, 530])
def test_a_saved_cache_goes_on(
    model: Any, factory: PagedCacheFactory, tmp_path: Path, length: int
) -> None:
    cache = filled(model, factory, TEXT[:length])
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    for each in (loaded, cache):
        stock = make_prompt_cache(model)
        model(mx.array([TEXT[:length]]), cache=stock)
        ours = greedy(model, TEXT[length : length + 5], each, 8)
        assert_same_run(ours, greedy(model, TEXT[length : length + 5], stock, 8), TOLERANCE)


@pytest.mark.slow
def test_a_preempted_sequence_goes_on_where_it_was(model: Any) -> None:
    probe = PagedCacheFactory(model, max_bytes="64MB")
    assert probe.can_admit(1)
    needed = sum(group.block_bytes for group in probe.pool.groups)
    factory = PagedCacheFactory(model, max_bytes=5 * needed)
    prompts = [TEXT[50 * at : 51 * at + 200] for at in range(6)]
    with factory:
        generator = BatchGenerator(model, max_tokens=65, prefill_step_size=256)
        given: dict[int, list[int]] = {}
        uids = generator.insert([list(each) for each in prompts])
        while tokens := [(each.uid, each.token) for each in generator.next_generated()]:
            for uid, token in tokens:
                given.setdefault(uid, []).append(token)
        generator.close()
    assert factory.stats().preemptions > 0
    for uid, prompt in list(zip(uids, prompts, strict=True))[-2:]:  # the last one had to wait
        assert given[uid] == alone(model, prompt, 65, 256).tokens


def test_a_step_that_does_not_fit_leaves_the_sequence_where_it_was(model: Any) -> None:
    probe = PagedCacheFactory(model, max_bytes="64MB")
    assert probe.can_admit(1)
    needed = sum(group.block_bytes for group in probe.pool.groups)
    factory = PagedCacheFactory(model, max_bytes=2 * needed)
    cache = filled(model, factory, TEXT[:254])
    blocker = filled(model, factory, TEXT[:200])
    with pytest.raises(PoolExhausted):
        model(mx.array([TEXT[254:258]]), cache=cache)
    assert cache[1].pending_kv.shape == (1, 2, 64)
    del blocker
    ours = greedy(model, TEXT[254:258], cache, 8)
    stock = make_prompt_cache(model)
    model(mx.array([TEXT[:254]]), cache=stock)
    assert_same_run(ours, greedy(model, TEXT[254:258], stock, 8), TOLERANCE)


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
    with pytest.raises(ValueError, match="layer 4 expects"):
        cache[2].update_window(row.astype(mx.float16))
    assert cache[0].offset == 6
    assert mx.array_equal(cache[1].pending_kv, before)
    # The same steps as here, as sums of other steps have another order.
    stock = make_prompt_cache(model)
    model(mx.array([TEXT[:6]]), cache=stock)
    ours = greedy(model, TEXT[6:9], cache, 8)
    assert_same_run(ours, greedy(model, TEXT[6:9], stock, 8), TOLERANCE)


@pytest.mark.parametrize("page_format", ["q8", "q4", ("q8", "fp16"), "auto"])
def test_rows_keep_16_bits(model: Any, page_format: Any) -> None:
    with pytest.raises(ValueError, match=r"page_format must be \"fp16\" for deepseek_v41.*index_k"):
        PagedCacheFactory(model, page_format=page_format)


def test_rows_that_do_not_fit_a_step_are_refused(model: Any, factory: PagedCacheFactory) -> None:
    cache = factory.make_cache()[1]
    with pytest.raises(ValueError, match="one sequence at a time"):
        cache.update_window(mx.zeros((2, 8, 64)))
    cache.update_window(mx.zeros((1, 8, 64)))
    with pytest.raises(
        ValueError, match=r"takes 2 new rows of 64 numbers in this step, got \(1, 3"
    ):
        cache.compress_kv = mx.zeros((1, 3, 64))
    with pytest.raises(AttributeError, match="no attribute 'rows'"):
        _ = cache.rows
