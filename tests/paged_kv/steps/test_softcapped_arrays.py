"""When attention with a softcap reads pages, and that everything else gets the gathered numbers."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, Sequence
from tests.support.generation import assert_same_runs, greedy, runs_of
from tests.support.zoo import small_model

KV_HEADS, GROUP, DIM, V_DIM, SOFTCAP = 2, 3, 32, 16, 2.0
LOWEST = mx.array(mx.finfo(mx.float32).min)
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(270)]


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.fixture
def cache(backend: str, hooked: None) -> PagedKVCache:
    """Two sequences, of 10 tokens and of 7."""
    return filled(1)


def filled(seed: int) -> PagedKVCache:
    pool = PagePool(1, max_bytes=8 << 20, name="test")
    cache = PagedKVCache(pool, 0, [Sequence(pool), Sequence(pool)])
    cache.prepare(lengths=[10, 7], right_padding=[0, 3])
    cache.update_and_fetch(
        normal(seed, 2, KV_HEADS, 10, DIM), normal(seed + 1, 2, KV_HEADS, 10, V_DIM)
    )
    cache.finalize()
    return cache


def capped(scores: Any) -> Any:
    scores = mx.tanh(scores / SOFTCAP)
    scores *= SOFTCAP
    return scores


class Step:
    """The next tokens of both sequences, as a model with a softcap takes them."""

    def __init__(self, cache: PagedKVCache, tokens: int = 1, group: int = GROUP) -> None:
        self.cache, self.group = cache, group
        self.mask: Any = cache.make_mask(tokens, return_array=True)
        self.keys, self.values = cache.update_and_fetch(
            normal(3, 2, KV_HEADS, tokens, DIM), normal(4, 2, KV_HEADS, tokens, V_DIM)
        )
        shape = (2, KV_HEADS, group, tokens, DIM) if group > 1 else (2, KV_HEADS, tokens, DIM)
        self.queries = normal(5, *shape)

    keys: Any
    values: Any

    def made_plain(self) -> "Step":
        """With arrays of MLX, and a mask for all groups of heads."""
        self.keys, self.values = mx.array(self.keys), mx.array(self.values)
        self.mask = mx.array(self.mask)[:, :, None] if self.group > 1 else mx.array(self.mask)
        mx.eval(self.keys, self.values, self.mask)
        self.cache.trim(self.queries.shape[-2])
        return self

    def grouped(self, array: Any) -> Any:
        return mx.expand_dims(array, 2) if self.group > 1 else array

    def scores(self) -> Any:
        return self.queries @ self.grouped(self.keys).swapaxes(-1, -2)

    def output(self, cap: Callable[[Any], Any] = capped) -> mx.array:
        scores = mx.where(self.mask, cap(self.scores()), LOWEST)
        output: mx.array = mx.softmax(scores, precise=True, axis=-1) @ self.grouped(self.values)
        return output

    def gathers(self, output: mx.array) -> int:
        """Compute the output and forget the arrays; returns how often the pool has gathered."""
        mx.eval(output)
        del self.keys, self.values
        gc.collect()
        return self.cache.pool.stats().gather_fallbacks


def close(ours: mx.array, theirs: mx.array) -> bool:
    return ours.shape == theirs.shape and bool(mx.allclose(ours, theirs, rtol=0, atol=1e-5))


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("group", [1, GROUP])
def test_a_step_reads_pages(cache: PagedKVCache, tokens: int, group: int) -> None:
    expected = Step(cache, tokens, group).made_plain().output()
    gc.collect()
    before = cache.pool.stats().gather_fallbacks
    step = Step(cache, tokens, group)
    output = step.output()
    assert close(output, expected)
    assert step.gathers(output) == before


def _in_place(scores: Any) -> Any:
    scores /= SOFTCAP
    scores = mx.tanh(scores)
    scores *= SOFTCAP
    return scores


CHANGES: dict[str, Callable[[Any], Any]] = {
    "no cap": lambda scores: scores,
    "no multiplication": lambda scores: mx.tanh(scores / SOFTCAP),
    "another multiplication": lambda scores: mx.tanh(scores / SOFTCAP) * 3.0,
    "another function": lambda scores: mx.sigmoid(scores / SOFTCAP) * SOFTCAP,
    "a sum before": lambda scores: capped(scores + 1),
    "a sum behind": lambda scores: capped(scores) + mx.arange(scores.shape[-1]),
    "capped twice": lambda scores: capped(capped(scores)),
    "a divisor for each token": lambda scores: mx.tanh(scores / mx.full(11, 3.0)) * 3.0,
    "a quotient in place": _in_place,
    "hidden before": lambda scores: capped(mx.where(mx.arange(11) > 8, scores, LOWEST)),
    "hidden twice": lambda scores: mx.where(mx.arange(11) > 8, capped(scores), LOWEST),
    "not hidden, but set": lambda scores: mx.where(mx.arange(11) > 8, capped(scores), 0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_scores_are_honoured(cache: PagedKVCache, name: str) -> None:
    expected = Step(cache, group=1).made_plain().output(CHANGES[name])
    gc.collect()
    before = cache.pool.stats().gather_fallbacks
    step = Step(cache, group=1)
    output = step.output(CHANGES[name])
    assert close(output, expected)
    assert step.gathers(output) == before + 1


def test_values_of_another_read_or_changed_are_not_taken_for_these(cache: PagedKVCache) -> None:
    weights = mx.softmax(capped(Step(cache).scores()), axis=-1)
    for values in (Step(filled(8)).values, Step(filled(8)).keys):
        grouped = mx.expand_dims(values, 2)
        assert close(weights @ grouped, mx.array(weights) @ mx.array(grouped))
    cache.trim(1)
    step = Step(cache)
    weights, grouped = mx.softmax(capped(step.scores()), axis=-1), step.grouped(step.values)
    grouped *= 2
    assert close(weights @ grouped, mx.array(weights) @ mx.array(grouped))


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("gemma2", num_hidden_layers=2)


def test_a_batch_decodes_as_prompts_alone_which_mlx_lm_cannot(model: Any, backend: str) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    prompts = [PROMPT[:30], PROMPT[5:75], PROMPT[3:4], PROMPT]
    generator = BatchGenerator(model, max_tokens=4, prefill_step_size=64, completion_batch_size=3)
    uids = generator.insert(
        [list(each) for each in prompts], caches=[factory.make_cache() for _ in prompts]
    )
    runs = runs_of(generator, uids)
    alone = [greedy(model, each, make_prompt_cache(model), 4, 64) for each in prompts]
    assert_same_runs(runs, alone, 1e-4)
    gc.collect()
    assert factory.stats().gather_fallbacks == 0
