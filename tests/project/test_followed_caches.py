"""The comparison of quantised pages passes with any rounding of sums, and finds faults."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.followed_caches import FollowedCache, Held, farthest, followed_caches
from tests.support.generation import greedy
from tests.support.grids import plain_cases

FORMATS: list[FormatName] = ["q8", "q4", ("q8", "q4")]
MODELS = ["stdlib-llama", "stdlib-gemma3"]
PAGE, WRONG = 256, 300


def scaled_keys(keys: mx.array, values: mx.array) -> Held:
    """A page of keys with a wrong scale."""
    scale = mx.where(mx.arange(keys.shape[2]) < PAGE, 1.05, 1.0)[:, None]
    return keys * scale, values


def wrong_row(keys: mx.array, values: mx.array) -> Held:
    """A page returns the next token in place of one."""
    rows = [WRONG + 1 if at == WRONG else at for at in range(keys.shape[2])]
    return keys[:, :, rows], values[:, :, rows]


def shifted_values(keys: mx.array, values: mx.array) -> Held:
    """The codes of one token lie one place too far."""
    token = mx.arange(values.shape[2])[:, None] == WRONG
    return keys, mx.where(token, mx.take(values, mx.arange(values.shape[3]) - 1, axis=3), values)


FAULTS = [scaled_keys, wrong_row, shifted_values]


@contextmanager
def rounded_otherwise(model: Any) -> Iterator[None]:
    """Changes every number of the model slightly, as another CPU's order of sums does."""
    embedding = model.model.embed_tokens
    weight = embedding.weight
    embedding.weight = weight * (1 + 1e-6)
    try:
        yield
    finally:
        embedding.weight = weight


def distance(model: Any, prompt: list[int], page_format: FormatName, fault: Any = None) -> float:
    """The distances of a run. With a fault, the second layer's oracle holds something wrong."""

    class Faulty(FollowedCache):
        def write(self, row: int, keys: mx.array, values: mx.array) -> Held:
            held = super().write(row, keys, values)
            is_in_second = self.paged.layer == 1 and held[0].shape[2] > WRONG + 1
            return fault(*held) if is_in_second else held

    factory = PagedCacheFactory(model, page_format=page_format, max_bytes=64 << 20)
    distances: list[mx.array] = []
    kind = Faulty if fault else FollowedCache
    greedy(model, prompt, followed_caches(model, factory, page_format, distances, kind), 2, 190)
    return farthest(distances)


@pytest.mark.parametrize(
    ("name", "page_format"),
    plain_cases([("stdlib-llama", "q8"), ("stdlib-gemma3", "q4")], product(MODELS, FORMATS)),
    ids=str,
)
@pytest.mark.slow
def test_rounding_stays_far_below_the_bound_and_faults_far_above(
    name: str, page_format: FormatName, trained: Any, source_text: str
) -> None:
    model, tokenizer = trained(name)
    prompt = tokenizer.encode(source_text[20000:26000])[:430]
    with rounded_otherwise(model):
        assert distance(model, prompt, page_format) <= 1 / 3
    for fault in FAULTS:
        assert distance(model, prompt, page_format, fault) >= 3, fault.__name__


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_token_that_attention_does_not_see_is_far_above_the_bound(
    name: str, trained: Any, source_text: str
) -> None:
    model, tokenizer = trained(name)
    prompt = tokenizer.encode(source_text[20000:26000])[:430]
    factory = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, "q4", distances)
    cache[1].window = (cache[1].window or len(prompt)) - 1
    greedy(model, prompt, cache, 2, 190)
    assert farthest(distances) >= 3
