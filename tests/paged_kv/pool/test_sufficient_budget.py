"""The budget that `PoolExhausted` names is enough; with blocks of one size, a byte less is not."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, PoolExhausted
from paged_kv.pool.layer_kinds import Window
from tests.support.layer_caches import caches_of

LAYERS, HEAD = 3, 32
BLOCK_BYTES = LAYERS * 2 * 256 * HEAD * 2
WINDOWS: dict[int, Window] = {0: Window(300, 64), 2: Window(600, 256, sink_tokens=4)}

OPTIONS: dict[str, dict[str, Any]] = {
    "one size": {},
    "windows": {"windows": WINDOWS},
    "auto": {"page_format": "auto"},
    "both": {"windows": WINDOWS, "page_format": "auto"},
}


def steps(seed: int) -> Iterator[tuple[int, int]]:
    """A sequence, and the tokens that it writes; none drop it. The first step has one token, so
    that the pool knows all layers."""
    rng = random.Random(seed)
    yield 0, 1
    while True:
        yield rng.randrange(6), 0 if rng.random() < 0.04 else rng.randrange(1, 700)


def run(pool: PagePool, todo: Iterator[tuple[int, int]]) -> tuple[int, PoolExhausted]:
    """The number of steps that a pool takes, and the error that ends them."""
    held: dict[int, list[PagedKVCache]] = {}
    for number, (name, count) in enumerate(todo):
        if not count:
            held.pop(name, None)
            gc.collect()
            continue
        if name not in held:
            held[name] = caches_of(pool)
        numbers = mx.zeros((1, 1, count, HEAD), dtype=mx.float16)
        try:
            for cache in held[name]:
                cache.update_and_fetch(numbers, numbers)
        except PoolExhausted as error:
            return number, error
    raise AssertionError("steps have no end")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_it_is_enough(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS[name]
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    blocks = random.Random(seed).randrange(4, 9)
    reached, error = run(PagePool(LAYERS, max_bytes=blocks * BLOCK_BYTES, **options), steps(seed))
    enough = error.sufficient_budget
    assert enough is not None
    assert error.budget < enough
    assert f"raise max_bytes to at least {enough:,}" in str(error)
    further, _ = run(PagePool(LAYERS, max_bytes=enough, **options), steps(seed))
    assert further > reached
    if not options:
        less, _ = run(PagePool(LAYERS, max_bytes=enough - 1), steps(seed))
        assert less == reached


@pytest.mark.parametrize(("prompt", "blocks"), [(4001, 5), (600, 1)])
@pytest.mark.parametrize("options", [{}, {"page_format": "q8"}, {"windows": WINDOWS}])
def test_it_holds_the_prompt_that_a_sequence_is_for(
    options: dict[str, Any], prompt: int, blocks: int
) -> None:
    def write(max_bytes: int) -> None:
        pool = PagePool(LAYERS, max_bytes=max_bytes, **options)
        caches = caches_of(pool)
        (sequence,) = caches[0].sequences
        for start in (0, *range(1, prompt, 512)):
            sequence.prompt_tokens = prompt
            count = min(512, prompt - start) if start else 1
            for cache in caches:
                numbers = mx.zeros((1, 1, count, HEAD), dtype=mx.float16)
                cache.update_and_fetch(numbers, numbers)

    with pytest.raises(PoolExhausted, match=rf"holds {prompt:,} tokens of the sequence") as error:
        write(blocks * BLOCK_BYTES)
    assert error.value.sufficient_tokens == prompt
    enough = error.value.sufficient_budget
    assert enough is not None
    write(enough)
    if not options:
        with pytest.raises(PoolExhausted):
            write(enough - BLOCK_BYTES)
