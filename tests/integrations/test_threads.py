"""Threads that share a factory generate the right tokens or raise a typed error, and never
crash."""

import gc
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import (
    PagedCacheFactory,
    PagedKVCache,
    PagePool,
    PoolExhausted,
    Sequence,
    ThreadConflict,
)
from paged_kv.integrations.attention_hook import paged_attention
from tests.support.generation import Run, assert_same_run, greedy
from tests.support.grids import plain_cases
from tests.support.patience import PATIENCE_S
from tests.support.zoo import small_model

ROUNDS = int(os.environ.get("PAGED_KV_STRESS_ROUNDS", "4"))
Compare = Callable[[Run, Run], None]


def step(tokens: int, seed: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, 2, tokens, 16), key=mx.random.key(seed))
    return keys, keys + 1


def new_cache(pool: PagePool) -> PagedKVCache:
    return PagedKVCache(pool, 0, [Sequence(pool)])


def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread of its own; returns its result, or raises its error."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.mark.usefixtures("backend")
def test_attention_follows_pages_that_moved_since_they_were_read() -> None:
    """As if `compact()` of another thread moved them between a layer's write and its attention."""
    pool = PagePool(1, max_bytes=1 << 24)
    first, second, cache = new_cache(pool), new_cache(pool), new_cache(pool)
    second.update_and_fetch(*step(512, 1))
    # The next two share a slab.
    pool.groups[0].allocator.ensure_free({"fp16": 4})
    first.update_and_fetch(*step(512, 1))
    cache.update_and_fetch(*step(300, 2))
    keys, values = cache.update_and_fetch(*step(1, 3))
    del first
    gc.collect()
    assert in_thread(pool.compact).blocks_moved > 0
    gathers = pool.stats().gather_fallbacks
    queries = mx.random.normal((1, 4, 1, 16), key=mx.random.key(4))
    found = paged_attention(queries, keys, values, None, 0.25, None)
    whole = [
        mx.concatenate(list(each), axis=2) for each in zip(step(300, 2), step(1, 3), strict=True)
    ]
    expected = mx.fast.scaled_dot_product_attention(queries, *whole, scale=0.25)
    assert mx.allclose(found, expected, atol=1e-5)
    del keys, values
    assert pool.stats().gather_fallbacks == gathers


def test_pages_of_another_threads_lazy_array_are_not_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "native")
    pool = PagePool(1, max_bytes=1 << 24)
    read, compute = threading.Event(), threading.Event()
    found: list[mx.array] = []

    def gather() -> None:
        cache = new_cache(pool)
        keys, values = step(300, 1)
        cache.update_and_fetch(keys[:, :, :299], values[:, :, :299])
        keys, _ = cache.update_and_fetch(keys[:, :, 299:], values[:, :, 299:])
        found.append(keys.sum(axis=2))
        del keys, _, cache
        gc.collect()
        read.set()
        compute.wait()
        mx.eval(found)

    with ThreadPoolExecutor(1) as thread:
        gathering = thread.submit(gather)
        assert read.wait(PATIENCE_S)
        taker = new_cache(pool)
        try:
            with pytest.raises(ThreadConflict):
                taker.update_and_fetch(*step(300, 2))
            assert taker.size() == 0
            pool.check()
        finally:
            compute.set()
        gathering.result()
    taker.update_and_fetch(*step(300, 2))
    assert mx.allclose(found[0], step(300, 1)[0].sum(axis=2), atol=1e-3)


@pytest.mark.slow
def test_a_slab_can_be_made_while_another_thread_clears_mlxs_cache() -> None:
    """`mx.clear_cache` waits for all streams, and meanwhile holds the interpreter's lock."""
    code = """
import os, threading
import mlx.core as mx
from paged_kv.kernels.pages.memory import untouched

making = threading.Thread(target=lambda: [untouched((1000, 64)) for _ in range(1000)], daemon=True)
making.start()
while making.is_alive():
    mx.eval(mx.zeros((64, 1000)) + 1)
    mx.clear_cache()
# MLX aborts now and then at the end of a process in which a thread has computed.
os._exit(0)
"""
    # A hang never ends; the limit does not measure the machine.
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


class Stress:
    """Threads that generate with one factory, and one that does everything else with it."""

    def __init__(self, model: Any, factory: PagedCacheFactory, compare: Compare) -> None:
        self.model, self.factory, self.compare = model, factory, compare
        self.outcomes: Counter[str] = Counter()
        rng = random.Random(0)
        texts = [[rng.randrange(1, 128) for _ in range(n)] for n in (30, 300, 1, 40, 250)]
        self.prompts = [begin + end for begin in texts[:2] for end in texts[2:]]
        self.expected = [greedy(model, each, make_prompt_cache(model), 8) for each in self.prompts]
        mx.eval([run.logprobs for run in self.expected])

    def run(self) -> None:
        factory, rng = self.factory, random.Random(-1)
        deeds: list[Callable[[], object]] = [
            factory.pool.compact,
            factory.clear,
            factory.stats,
            factory.pool.check,
            lambda: factory.can_admit(300),
            gc.collect,
        ]
        with ThreadPoolExecutor(2) as threads:
            generating = [threads.submit(self._generate, random.Random(each)) for each in range(2)]
            while not all(each.done() for each in generating):
                rng.choice(deeds)()
                threading.Event().wait(0.001)
            for each in generating:
                each.result()

    def _generate(self, rng: random.Random) -> None:
        for _ in range(ROUNDS):
            at = rng.randrange(len(self.prompts))
            try:
                self.compare(self._one(rng, self.prompts[at]), self.expected[at])
                self.outcomes["done"] += 1
            except (PoolExhausted, ThreadConflict) as error:
                self.outcomes[type(error).__name__] += 1

    def _one(self, rng: random.Random, prompt: list[int]) -> Run:
        cache, cached = self.factory.make_cache(), 0
        if rng.random() < 0.5:
            cache, cached = self.factory.fetch_cache(prompt)
        run = greedy(self.model, prompt[cached:], cache, 8, step=rng.choice([64, 256, 2048]))
        mx.eval(run.logprobs)
        if rng.random() < 0.5:
            self.factory.insert_cache(prompt, cache)
        return run


def is_same(ours: Run, stock: Run) -> None:
    assert_same_run(ours, stock, 2e-3)


def is_a_run(ours: Run, stock: Run) -> None:
    """Quantised pages promise no more here: logits, and no NaN among them."""
    assert len(ours.tokens) == len(stock.tokens)
    assert not mx.isnan(ours.logprobs).any()


@pytest.mark.parametrize(
    ("name", "page_format", "blocks"),
    plain_cases([("gemma3_text", "fp16", 9)], [("gemma3_text", "fp16", 9), ("llama", "auto", 8)]),
)
@pytest.mark.slow
def test_one_factory_in_two_threads_is_right_or_says_why_not(
    name: str, page_format: str, blocks: int
) -> None:
    model = small_model(name)
    probe = PagedCacheFactory(model)
    probe.can_admit(1)
    block_bytes = sum(group.size.block_bytes for group in probe.pool.groups)
    factory = PagedCacheFactory(model, max_bytes=blocks * block_bytes, page_format=page_format)
    stress = Stress(model, factory, is_same if page_format == "fp16" else is_a_run)
    stress.run()
    assert stress.outcomes.total() == 2 * ROUNDS
    assert stress.outcomes["done"] > 0
    if page_format == "fp16":
        assert not stress.outcomes["ThreadConflict"]
    gc.collect()
    factory.clear()
    factory.pool.check()
    assert factory.stats().blocks_used == 0
