"""Steps that fit an "auto" pool only because the reservation requantises pages, also those that the
step has not written yet."""

import random
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import OldestFirst, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.cache.saved_state import page_formats
from paged_kv.kernels.pages.page_format import page_format_named
from paged_kv.pool.layer_kinds import Window
from paged_kv.steps.batch import Batch
from tests.support.attended_step import attended
from tests.support.layer_caches import caches_of

DIMS = (32, 64)
BLOCK = 256 * sum(DIMS) * 2 * 2
HEAD = 32
SCALE = 0.2
ONE_LAYER_BLOCK = 256 * HEAD * 4 * 2
# Errors of a normal number that has 4 bits, and of outputs beside those from the numbers that
# pages hold. A page of 4 bits that a step goes on in is recoded with another centre for its keys.
HELD, ATTENDED = 0.9, 0.06
attention = mx.fast.scaled_dot_product_attention


def write(pool: PagePool, sequence: Sequence, count: int) -> None:
    """A step of one sequence, through layers of different size."""
    for layer in range(pool.num_layers):
        numbers = mx.random.normal((1, 1, count, DIMS[layer % 2])).astype(mx.float16)
        PagedKVCache(pool, layer, [sequence]).update_and_fetch(numbers, numbers)


def test_a_step_that_does_not_fit_leaves_every_table_as_it_was() -> None:
    pool = PagePool(2, max_bytes=5 * BLOCK, page_format="auto")
    sequence = Sequence(pool)
    write(pool, sequence, 300)
    held = len(sequence.blocks(pool.groups[0]))
    with pytest.raises(PoolExhausted):
        write(pool, sequence, 100_000)
    with pytest.raises(PoolExhausted):
        Batch.of(pool, [sequence]).begin(0, 100_000).begin_in_model()
    pool.check()
    assert sequence.context_lens == [300, 300]
    assert len(sequence.blocks(pool.groups[0])) == held
    write(pool, sequence, 500)


WINDOWS = {1: Window(300, 200)}


@pytest.mark.parametrize(
    ("windows", "seed", "rounds"),
    [
        (WINDOWS, 0, 6),
        pytest.param(WINDOWS, 1, 12, marks=pytest.mark.soak),
        pytest.param({}, 0, 12, marks=pytest.mark.slow),
    ],
)
def test_can_admit_is_right_both_ways(windows: dict[int, Window], seed: int, rounds: int) -> None:
    """A prompt fits in steps of any size if `can_admit` says so, and otherwise in none."""
    rng = random.Random(seed)
    answers = []
    for _ in range(rounds):
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


def numbers(count: int, seed: int) -> mx.array:
    return mx.random.normal((1, 1, count, HEAD), key=mx.random.key(seed))


def held(sequence: Sequence, layer: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values."""
    both = PagedKVCache(sequence.pool, layer, [sequence]).keys_and_values()
    mx.eval(both)
    return both


def worst(sequence: Sequence, given: mx.array, layer: int = 0) -> float:
    """The largest error of what was given as keys and values."""
    return max(float(mx.abs(each - given).max()) for each in held(sequence, layer))


def expected(sequence: Sequence, step: mx.array) -> mx.array:
    """What a step attends to: of its own tokens those in the same page as they were given, and
    before them what the pages hold after the step."""
    pages, outputs = held(sequence), []
    end = sequence.context_lens[0]
    start = end - step.shape[2]
    for first in range(start - start % 256, end, 256):
        own = step[:, :, max(first, start) - start : first + 256 - start]
        seen = [mx.concatenate([part[:, :, : max(first, start)], own], axis=2) for part in pages]
        outputs.append(attention(own, *seen, scale=SCALE, mask="causal"))
    return mx.concatenate(outputs, axis=2)


@pytest.mark.parametrize("full", ["fp16", "q8"])
def test_a_step_goes_on_in_a_page_that_its_reservation_requantised(full: str, backend: str) -> None:
    """Its own tokens there have 16 bits while the page is written, and the earlier ones stay."""
    pool = PagePool(1, max_bytes=3 * ONE_LAYER_BLOCK, page_format=OldestFirst(recent=1))
    sequence = Sequence(pool, page_format_named(full))
    cache = PagedKVCache(pool, 0, [sequence])
    given = numbers(1300, seed=1)
    attended(cache, given[:, :, :700], scale=SCALE)
    step = given[:, :, 700:]
    output = attended(cache, step, scale=SCALE)
    assert page_formats(pool, 0, sequence)[2] == "q4", "the page that the step began in was spared"
    assert mx.abs(output - expected(sequence, step)).max() < ATTENDED
    assert worst(sequence, given) < HELD
    pool.check()


@pytest.mark.parametrize(("page_format", "blocks"), [("q4", 4), (OldestFirst(recent=1), 3)])
@pytest.mark.parametrize("steps", [(300, 400, 300), (256, 1, 743), (1000,)])
def test_a_layer_takes_other_steps_than_the_one_before_it(
    page_format: Any, blocks: int, steps: tuple[int, ...]
) -> None:
    """The first layer's step has reserved pages of few bits where the next one's ends."""
    pool = PagePool(2, max_bytes=blocks * 2 * ONE_LAYER_BLOCK, page_format=page_format)
    caches = caches_of(pool)
    (sequence,) = caches[0].sequences
    given = numbers(1000, seed=1)
    caches[0].update_and_fetch(given, given)
    assert "q4" in page_formats(pool, 0, sequence)
    for at, count in enumerate(steps):
        step = given[:, :, sum(steps[:at]) :][:, :, :count]
        caches[1].update_and_fetch(step, step)
    for layer in range(2):
        assert worst(sequence, given, layer) < HELD
    pool.check()
