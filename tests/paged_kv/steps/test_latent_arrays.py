"""When latent attention reads pages, and that everything else gets the gathered numbers."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.steps.recognised_arrays import PositionScores

HEADS, DIM, POSITIONS, SCALE = 4, 32, 16, 0.2
LOWEST = mx.array(mx.finfo(mx.float32).min)


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.fixture(params=["plain", "native"])
def cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, hooked: None
) -> PagedKVCache:
    """Two sequences, of 10 tokens and of 7."""
    monkeypatch.setenv("PAGED_KV_BACKEND", request.param)
    return filled(1)


def filled(seed: int) -> PagedKVCache:
    pool = PagePool(1, max_bytes=8 << 20, name="test")
    cache = PagedKVCache(pool, 0, [Sequence(pool), Sequence(pool)])
    cache.prepare(lengths=[10, 7], right_padding=[0, 3])
    cache.update_and_fetch(normal(seed, 2, 1, 10, DIM), normal(seed + 1, 2, 1, 10, POSITIONS))
    cache.finalize()
    return cache


class Step:
    """The next token of both sequences, as a model with latent attention takes it."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.mask: Any = cache.make_mask(1)
        self.latents, self.positions = cache.update_and_fetch(
            normal(3, 2, 1, 1, DIM), normal(4, 2, 1, 1, POSITIONS)
        )
        self.queries = normal(5, 2, HEADS, 1, DIM)
        self.position_queries = normal(6, 2, HEADS, 1, POSITIONS)

    def scores(self) -> Any:
        scores = self.position_queries @ self.positions.swapaxes(-1, -2)
        return mx.where(self.mask, scores, LOWEST)

    def attend(self, scores: Any, keys: Any = None) -> mx.array:
        keys = self.latents if keys is None else keys
        return paged_attention(self.queries, keys, keys, self.cache, SCALE, scores)


def expected(cache: PagedKVCache, change: Callable[[mx.array], mx.array]) -> mx.array:
    """The same step on MLX's own arrays, with a change of the scores."""
    step = Step(cache)
    latents, positions = mx.array(step.latents), mx.array(step.positions)
    scores = step.position_queries @ positions.swapaxes(-1, -2)
    scores = change(mx.where(mx.array(step.mask), scores, LOWEST))
    output = mx.fast.scaled_dot_product_attention(
        step.queries, latents, latents, scale=SCALE, mask=scores
    )
    mx.eval(output)
    cache.trim(1)
    return output


def close(ours: mx.array, theirs: mx.array) -> bool:
    return bool(mx.allclose(ours, theirs, rtol=0, atol=1e-5))


def _in_place(scores: Any) -> Any:
    scores += 1
    scores[..., :2] = 3
    return scores


def test_scores_changed_in_place_are_honoured(cache: PagedKVCache) -> None:
    reference = expected(cache, _in_place)
    step = Step(cache)
    assert close(step.attend(_in_place(step.scores())), reference)


@pytest.mark.parametrize("fill", [0.0, -1e4])
def test_scores_that_keep_some_weight_are_no_hidden_ones(cache: PagedKVCache, fill: Any) -> None:
    step = Step(cache)
    scores = step.position_queries @ step.positions.swapaxes(-1, -2)
    assert type(scores) is PositionScores
    assert type(mx.where(step.mask, scores, LOWEST)) is PositionScores
    assert type(mx.where(step.mask, scores, fill)) is mx.array


@pytest.mark.parametrize("with_the_caches", [False, True])
def test_a_mask_of_the_models_own_is_honoured(cache: PagedKVCache, with_the_caches: bool) -> None:
    step = Step(cache)
    scores = step.position_queries @ step.positions.swapaxes(-1, -2)
    scores = mx.where(mx.arange(11) % 2 == 0, scores, LOWEST)
    if with_the_caches:
        scores = mx.where(step.mask, scores, LOWEST)
    latents = mx.array(step.latents)
    theirs = mx.fast.scaled_dot_product_attention(
        step.queries, latents, latents, scale=SCALE, mask=mx.array(scores)
    )
    assert close(step.attend(scores), theirs)


def test_latents_of_another_read_are_not_taken_for_this_ones(cache: PagedKVCache) -> None:
    step = Step(cache)
    scores = step.scores()
    other = Step(filled(8)).latents
    keys = mx.array(other)
    theirs = mx.fast.scaled_dot_product_attention(
        step.queries, keys, keys, scale=SCALE, mask=mx.array(scores)
    )
    assert close(step.attend(scores, other), theirs)
