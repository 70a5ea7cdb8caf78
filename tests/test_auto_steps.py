"""Steps that fit an "auto" pool only because the reservation requantises pages."""

import random
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.pool.window import Window
from paged_kv.sequences.step_blocks import reserve
from paged_kv.sequences.step_row import StepRow
from tests.generation import greedy

DIMS = (32, 64)
BLOCK = 256 * sum(DIMS) * 2 * 2


def write(pool: PagePool, sequence: Sequence, count: int) -> None:
    """A step of one sequence, through layers of different size."""
    for layer in range(pool.num_layers):
        numbers = mx.random.normal((1, 1, count, DIMS[layer % 2])).astype(mx.float16)
        PagedKVCache(pool, layer, [sequence]).update_and_fetch(numbers, numbers)


@pytest.mark.parametrize(
    "step", [2048, *(pytest.param(n, marks=pytest.mark.slow) for n in (512, 256))]
)
def test_a_prompt_fits_whatever_the_step(trained: Any, source_text: str, step: int) -> None:
    model, tokenizer = trained("stdlib-llama")
    prompt = tokenizer.encode(source_text)[:3000]
    factory = PagedCacheFactory(model, max_bytes="8MiB", page_format="auto")
    assert factory.can_admit(3000)
    cache = factory.make_cache()
    run = greedy(model, prompt, cache, 2, step=step)
    assert not mx.isnan(run.logprobs).any()
    assert factory.stats().bytes_mapped <= 8 << 20
    formats = [each for each in factory.stats().groups[0].formats if each.used]
    assert {each.page_format for each in formats} > {"fp16"}


def test_a_step_that_does_not_fit_leaves_every_table_as_it_was() -> None:
    pool = PagePool(2, max_bytes=5 * BLOCK, page_format="auto")
    sequence = Sequence(pool)
    write(pool, sequence, 300)
    held = len(sequence.blocks(pool.groups[0]))
    with pytest.raises(PoolExhausted):
        write(pool, sequence, 100_000)
    with pytest.raises(PoolExhausted):
        reserve(pool, [StepRow.next(sequence, 0, 100_000)])
    pool.check()
    assert sequence.context_lens == [300, 300]
    assert len(sequence.blocks(pool.groups[0])) == held
    write(pool, sequence, 500)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
@pytest.mark.parametrize("windows", [{}, {1: Window(300, 200)}])
def test_can_admit_is_right_both_ways(windows: dict[int, Window], seed: int) -> None:
    """A prompt fits in steps of any size if `can_admit` says so, and otherwise in none."""
    rng = random.Random(seed)
    answers = []
    for _ in range(12):
        blocks = rng.choice([3, 4, 5.3, 6, 8, 10, 13])
        max_bytes = int(blocks * BLOCK)
        pool = PagePool(2, windows=windows, max_bytes=max_bytes, page_format="auto")
        write(pool, Sequence(pool), 1)
        held = []
        for _ in range(rng.randrange(3)):
            held.append(Sequence(pool))
            try:
                write(pool, held[-1], rng.randrange(1, int(blocks * 300)))
            except PoolExhausted:
                break
        tokens = rng.randrange(1, int(blocks * 900))
        admitted = pool.can_admit(tokens)
        answers.append(admitted)
        step, sequence = rng.choice([256, 512, tokens]), Sequence(pool)
        try:
            for start in range(0, tokens, step):
                write(pool, sequence, min(step, tokens - start))
            assert admitted, (blocks, tokens, step)
        except PoolExhausted:
            assert not admitted, (blocks, tokens, step)
        pool.check()
    assert len(set(answers)) == 2
