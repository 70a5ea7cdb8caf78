"""`factory.stats()` explains MLX's active memory, whatever has happened, but for the bytes of
masks."""

import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache
from tests.support.zoo import small_model


@pytest.fixture(autouse=True)
def exact_memory() -> Iterator[None]:
    """MLX keeps no freed memory, so that its count of active bytes is that of its arrays."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


class History:
    """A model, and what happens to the caches of a factory."""

    def __init__(self, name: str, page_format: str) -> None:
        self.rng = random.Random(len(name + page_format))
        self.model: Any = small_model(name)
        self.caches: list[tuple[Any, list[int]]] = []
        # What the model itself makes when it is first called.
        self.step(PagedCacheFactory(self.model, max_bytes="16MB").make_cache(), [1, 2])
        gc.collect()
        self.before = mx.get_active_memory()
        self.factory = PagedCacheFactory(self.model, max_bytes="16MB", page_format=page_format)

    def step(self, cache: Any, tokens: list[int]) -> None:
        mx.eval(self.model(mx.array([tokens]), cache=cache))

    def rules(self) -> list[Callable[[], object]]:
        """What may happen now."""
        if not self.caches:
            return [self.begin]
        cache, tokens = self.rng.choice(self.caches)
        found: list[Callable[[], object]] = [self.go_on, self.go_on, self.go_on]
        found += [lambda: self.caches.pop(0)] * 2
        found += [
            lambda: self.factory.insert_cache(tokens, cache),
            self.factory.pool.compact,
            self.factory.clear,
        ]
        if len(self.caches) < 6:
            found += [self.begin, self.begin, self.begin]
            found.append(lambda: self.caches.append((copy.deepcopy(cache), list(tokens))))
        return found

    def begin(self) -> None:
        prompt = [self.rng.randrange(60) for _ in range(self.rng.randrange(2, 1200))]
        if self.caches and self.rng.random() < 0.5:
            prompt = self.caches[0][1][:400] + prompt
        cache, found = self.factory.fetch_cache(prompt)
        for start in range(found, len(prompt), 512):
            self.step(cache, prompt[start : start + 512])
        self.caches.append((cache, prompt))

    def go_on(self) -> None:
        for cache, tokens in self.caches:
            for _ in range(self.rng.choice([1, 3, 20])):
                tokens.append(self.rng.randrange(60))
                self.step(cache, tokens[-1:])

    def unexplained(self) -> int:
        """Bytes that neither the statistics nor caches that are not paged explain."""
        gc.collect()
        own = [each for cache, _ in self.caches for each in cache]
        stock = sum(int(each.nbytes) for each in own if not isinstance(each, PagedKVCache))
        explained = stock + self.factory.stats().bytes_held
        mx.synchronize()
        return mx.get_active_memory() - self.before - explained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_format"), [("qwen3", "q4"), ("qwen3", "auto"), ("gemma3_text", "fp16")]
)
def test_statistics_name_every_byte_that_mlx_holds(name: str, page_format: str) -> None:
    history = History(name, page_format)
    beside = 0
    for _ in range(24):
        history.rng.choice(history.rules())()
        # Two numbers of the mask that a window's latest step has not computed.
        masks = 8 * len(history.caches) if history.factory.pool.windows else 0
        assert 0 <= history.unexplained() <= masks
        beside = max(beside, history.factory.stats().bytes_steps)
    # A step that is too long for a ring waits for the next one.
    assert (beside > 0) == (name == "gemma3_text")
    history.caches.clear()
    gc.collect()
    history.factory.clear()
    assert history.factory.stats().bytes_mapped == 0
    assert history.unexplained() == 0
