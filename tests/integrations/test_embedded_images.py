"""Prompts whose images a model of mlx-lm embeds are computed in steps, behind cached prefixes."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.server.engine.image_support import EmbeddedImages
from tests.support.zoo import small_model

TOKENS = [(7 * at) % 97 for at in range(40)]
STARTS = [5, 20]


class Seeing:
    """A model whose image tokens are those at `STARTS`, and whose images are numbers."""

    def __init__(self) -> None:
        self.model: Any = small_model("qwen3", num_hidden_layers=1)
        self.seen: list[Any] = []

    def embed_inputs(self, inputs: mx.array, *, pixel_values: list[mx.array]) -> mx.array:
        self.seen = [each.item() for each in pixel_values]
        embeddings: mx.array = self.model.model.embed_tokens(inputs)
        for start, image in zip(STARTS[-len(pixel_values) :], pixel_values, strict=True):
            at = start - len(TOKENS) + len(inputs)
            assert at >= 0, "an image of the prefix"
            embeddings[at] += image
        return embeddings

    def __call__(self, inputs: mx.array, cache: Any, **embeddings: Any) -> mx.array:
        logits: mx.array = self.model(inputs, cache=cache, **embeddings)
        return logits


@pytest.mark.parametrize(
    ("cached", "seen"), [(0, [1.0, 2.0]), (5, [1.0, 2.0]), (6, [2.0]), (21, [])]
)
def test_steps_behind_a_prefix_are_those_of_the_whole(cached: int, seen: list[float]) -> None:
    model = Seeing()
    factory = PagedCacheFactory(model.model, max_bytes=64 << 20)
    pixels = [mx.array(1.0), mx.array(2.0)]
    vision: Any = SimpleNamespace(cache_key=TOKENS, starts=STARTS, pixel_values=pixels)
    images = EmbeddedImages(TOKENS, vision)

    def logits(start: int, size: int, cache: list[Any], end: int = len(TOKENS)) -> mx.array:
        steps = images.begin(model, start)
        assert steps.start == start
        for at in range(start, end, size):
            step = steps(mx.array([TOKENS[at : min(at + size, end)]]), cache)
        return step[:, -1]

    expected = logits(0, len(TOKENS), factory.make_cache())
    cache = factory.make_cache()
    if cached:
        logits(0, 3, cache, end=cached)
    model.seen = []
    got = logits(cached, 3, cache)
    assert model.seen == seen
    assert mx.allclose(got, expected, atol=1e-4)
