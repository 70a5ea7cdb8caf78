"""`factory.stats()` explains MLX's active memory, whatever has happened, but for the bytes
of masks."""

import copy
import gc
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from tests.support.grids import plain_cases
from tests.support.zoo import small_model

STEPS = 60


@pytest.fixture(autouse=True)
def exact_memory() -> Iterator[None]:
    """MLX keeps no freed memory, so that its count of active bytes is that of its arrays."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


class History:
    """A model, and what happens to the caches of a factory."""

    def __init__(self, name: str, page_format: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model: Any = small_model(name)
        self.caches: list[tuple[Any, list[int]]] = []
        # What the model itself makes when it is first called.
        self.step(PagedCacheFactory(self.model, max_bytes="16MB").make_cache(), [1, 2])
        gc.collect()
        self.before = mx.get_active_memory()
        self.factory = PagedCacheFactory(self.model, max_bytes="16MB", page_format=page_format)

    def step(self, cache: Any, tokens: list[int]) -> None:
        mx.eval(self.model(mx.array([tokens]), cache=cache))

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(60) for _ in range(count)]

    def begin(self) -> None:
        if len(self.caches) < 6:
            prompt = self.tokens(self.rng.randrange(2, 1200))
            # Some prompts begin alike.
            if self.caches and self.rng.random() < 0.5:
                prompt = self.rng.choice(self.caches)[1][:400] + prompt
            cache, found = self.factory.fetch_cache(prompt)
            for start in range(found, len(prompt), 512):
                self.step(cache, prompt[start : start + 512])
            self.caches.append((cache, prompt))

    def go_on(self) -> None:
        for cache, tokens in self.caches:
            for _ in range(self.rng.choice([1, 3, 40])):
                tokens.append(self.rng.randrange(60))
                self.step(cache, tokens[-1:])

    def insert(self) -> None:
        if self.caches:
            cache, tokens = self.rng.choice(self.caches)
            self.factory.insert_cache(tokens, cache)

    def fork(self) -> None:
        if 0 < len(self.caches) < 6:
            cache, tokens = self.rng.choice(self.caches)
            self.caches.append((copy.deepcopy(cache), list(tokens)))

    def drop(self) -> None:
        if self.caches:
            self.caches.pop(self.rng.randrange(len(self.caches)))

    def compact(self) -> None:
        self.factory.pool.compact()

    def clear(self) -> None:
        self.factory.clear()

    def explained(self) -> int:
        """Bytes that the statistics name, and those of caches that are not paged."""
        own = [layer for cache, _ in self.caches for layer in cache if not is_paged(layer)]
        return self.factory.stats().bytes_held + sum(int(layer.nbytes) for layer in own)

    def held(self) -> int:
        gc.collect()
        mx.synchronize()
        return mx.get_active_memory() - self.before


def is_paged(layer: Any) -> bool:
    return type(layer).__module__.startswith("paged_kv")


@pytest.mark.parametrize(
    ("name", "page_format"),
    plain_cases(
        [("qwen3", "q4"), ("gemma3_text", "fp16")],
        [
            (name, each)
            for name in ("qwen3", "gemma3_text")
            for each in ("fp16", "q8", "q4", "auto")
        ],
    ),
)
def test_statistics_name_every_byte_that_mlx_holds(name: str, page_format: str) -> None:
    history = History(name, page_format, seed=len(name + page_format))
    rules = [history.begin] * 3 + [history.go_on] * 3 + [history.drop] * 2
    rules += [history.insert, history.fork, history.compact, history.clear]
    beside = 0
    for _ in range(STEPS):
        rule = history.rng.choice(rules)
        rule()
        explained = history.explained()
        # Two numbers of the mask that a window's latest step has not computed.
        masks = 8 * len(history.caches) if history.factory.pool.windows else 0
        assert 0 <= history.held() - explained <= masks, rule.__name__
        beside = max(beside, history.factory.stats().bytes_steps)
    # A step that is too long for a ring waits for the next one.
    assert (beside > 0) == (name == "gemma3_text")
    history.caches.clear()
    gc.collect()
    history.clear()
    assert history.factory.stats().bytes_mapped == 0
    explained = history.explained()
    assert history.held() == explained
