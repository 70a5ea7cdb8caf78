"""The members of a cache that mlx-lm uses for batches, compared with its own `BatchKVCache`."""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from paged_kv import PagedKVCache, PagePool, PoolExhausted
from tests.support.layer_caches import caches_of

LAYERS, HEADS, DIM = 2, 2, 16
Layers = list[PagedKVCache]


@pytest.fixture
def pool() -> PagePool:
    return PagePool(LAYERS, max_bytes=16 << 20)


def random_step(tokens: int, seed: int, batch: int = 1) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((batch, HEADS, tokens, DIM), key=mx.random.key(seed))
    return keys, keys + 1


def sequence_of(pool: PagePool, tokens: int, seed: int = 0) -> Layers:
    """A cache of one sequence with that many tokens, one view per layer."""
    layers = caches_of(pool)
    write(layers, random_step(tokens, seed))
    return layers


def write(layers: Layers, step: tuple[mx.array, mx.array]) -> None:
    for cache in layers:
        cache.update_and_fetch(*step)


def each(layers: Layers, name: str, *arguments: Any, **options: Any) -> list[Any]:
    """Call a method layer by layer, as mlx-lm does."""
    return [getattr(cache, name)(*arguments, **options) for cache in layers]


def merged(batch: list[Layers]) -> Layers:
    return [layer[0].merge(list(layer)) for layer in zip(*batch, strict=True)]


def lengths(layers: Layers) -> list[list[int]]:
    return [
        [sequence.context_lens[cache.layer] for sequence in cache.sequences] for cache in layers
    ]


def row(cache: PagedKVCache, index: int) -> Any:
    """Keys and values of one sequence, without padding before and after it."""
    sequence = cache.sequences[index]
    progress = sequence.progress(cache.layer)
    tokens, padding = progress.tokens, progress.padding.right
    keys, values = cache.keys_and_values()
    end = keys.shape[2] - padding
    return [part[index, :, end - tokens : end].tolist() for part in (keys, values)]


def mask_of(batch: Layers, tokens: int, window: int | None = None) -> mx.array:
    mask = batch[0].make_mask(tokens, window_size=window)
    assert isinstance(mask, mx.array)
    return mask


def stock_like(tokens: int, seed: int = 0) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(*random_step(tokens, seed))
    return cache


@pytest.mark.parametrize("by", ["merge", "extend"])
def test_tokens_of_stock_caches_go_into_pages(pool: PagePool, by: str) -> None:
    sizes = (3, 300, 0, 40)
    stock = [BatchKVCache.merge([stock_like(size, size) for size in sizes]) for _ in range(LAYERS)]
    plain = [[stock_like(size, size), KVCache(), stock_like(40, 40)] for size in (300, 300)]
    batch = sequence_of(pool, 3, 3)
    before = pool.stats().gather_fallbacks
    if by == "merge":
        batch = [cache.merge([cache, *rest]) for cache, rest in zip(batch, plain, strict=True)]
    else:
        for cache, rest in zip(batch, plain, strict=True):
            cache.extend(BatchKVCache.merge(rest))
    assert batch[0].sequences == batch[1].sequences
    assert pool.stats().gather_fallbacks == before
    step = random_step(1, 1, batch=4)
    for cache, theirs in zip(batch, stock, strict=True):
        keys, values = theirs.update_and_fetch(*step)
        cache.update_and_fetch(*step)
        for index, size in enumerate(sizes):
            expected = [part[index, :, 300 - size :].tolist() for part in (keys, values)]
            assert row(cache, index) == expected


def test_a_batch_remembers_no_sequences_that_nobody_holds(pool: PagePool) -> None:
    (cache, *_) = sequence_of(pool, 3)
    for _ in range(3):
        cache.merge([cache, stock_like(3)])
    assert len(cache.batch._newcomers._made) == 1


def test_what_does_not_hold_all_tokens_in_arrays_is_refused(pool: PagePool) -> None:
    batch, latest, none = sequence_of(pool, 3), stock_like(3), list[int]()
    latest.offset = 300
    for other in (latest, none, BatchKVCache([0, 2])):
        with pytest.raises(ValueError, match="make_cache"):
            batch[0].extend(other)
    assert lengths(batch) == [[3]] * LAYERS


def test_a_row_that_is_kept_twice_is_forked(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 5), sequence_of(pool, 6)])
    each(batch, "filter", [1, 1])
    write(batch, random_step(1, 3, batch=2))
    assert row(batch[1], 0) != row(batch[1], 1)
    assert lengths(batch) == [[7, 7]] * LAYERS


def test_right_padding_is_not_stored_and_reads_as_with_stock(pool: PagePool) -> None:
    """Sequences that already hold some tokens read prompts of 11, 2 and 0 tokens in steps of 4."""
    sizes, prompt = (3, 250, 0), [11, 2, 0]
    batch = merged([sequence_of(pool, tokens, tokens) for tokens in sizes])
    stock = BatchKVCache.merge([stock_like(tokens, tokens) for tokens in sizes])
    padding = [max(prompt) - tokens for tokens in prompt]
    each(batch, "prepare", lengths=prompt, right_padding=padding)
    stock.prepare(lengths=prompt, right_padding=padding)
    for number, tokens in enumerate((4, 4, 3)):
        for window in (None, 5):
            ours = mask_of(batch, tokens, window)
            assert mx.array_equal(ours, stock.make_mask(tokens, window_size=window))
        step = random_step(tokens, number, batch=3)
        write(batch, step)
        theirs, _ = stock.update_and_fetch(*step)
        ours, _ = batch[1].keys_and_values()
        assert ours.shape == theirs.shape
        assert mx.array_equal(batch[1].offset, stock.offset)
    each(batch, "finalize")
    stock.finalize()
    assert lengths(batch) == [[14, 252, 0]] * LAYERS
    assert mx.array_equal(batch[1].offset, stock.offset)
    step = random_step(1, 77, batch=3)
    ours, theirs = batch[0].update_and_fetch(*step)[0], stock.update_and_fetch(*step)[0]
    for index, tokens in enumerate((15, 253, 1)):
        assert mx.array_equal(ours[index, :, -tokens:], theirs[index, :, -tokens:])


def test_left_padding_is_skipped_and_gives_negative_offsets(pool: PagePool) -> None:
    batch = caches_of(pool, 2)
    stock = BatchKVCache([0, 6])
    each(batch, "prepare", left_padding=[0, 6])
    for number, tokens in enumerate((4, 5, 1)):
        assert mx.array_equal(batch[0].offset, stock.offset)
        assert mx.array_equal(mask_of(batch, tokens), stock.make_mask(tokens))
        step = random_step(tokens, number, batch=2)
        theirs, _ = stock.update_and_fetch(*step)
        write(batch, step)
    assert lengths(batch) == [[10, 4]] * LAYERS
    assert row(batch[1], 1)[0] == theirs[1, :, 6:].tolist()


def test_a_batch_that_does_not_fit_changes_nothing_and_goes_on_without_a_row() -> None:
    page_bytes = 2 * HEADS * 256 * DIM * 4
    pool = PagePool(LAYERS, max_bytes=4 * LAYERS * page_bytes)
    batch = merged([sequence_of(pool, tokens, tokens) for tokens in (256, 512, 40)])
    gc.collect()
    before = [row(batch[0], index) for index in range(3)]
    for attempt in (batch[0].make_mask, lambda n: write(batch, random_step(n, 1, batch=3))):
        with pytest.raises(PoolExhausted) as error:
            attempt(1)
        assert (error.value.needed, error.value.free) == (2, 0)
        # The traceback holds the frames, and those hold the sequences.
        del error
    assert lengths(batch) == [[256, 512, 40]] * LAYERS
    assert [row(batch[0], index) for index in range(3)] == before
    pool.check()
    each(batch, "filter", [0, 2])
    write(batch, random_step(1, 2, batch=2))
    assert lengths(batch) == [[257, 41]] * LAYERS
    assert [row(batch[0], 1)[0][head][:40] for head in range(HEADS)] == before[2][0]


def test_a_new_cache_takes_a_batch_and_layers_stay_together(pool: PagePool) -> None:
    batch = caches_of(pool)
    with pytest.raises(PoolExhausted):
        write(batch, random_step(100_000, 1, batch=3))
    assert batch[0].offset == 0
    for tokens in (300, 1):
        write(batch, random_step(tokens, tokens, batch=3))
    assert lengths(batch) == [[301] * 3] * LAYERS
    assert batch[0].sequences == batch[1].sequences
    assert row(batch[1], 2)[0] != row(batch[1], 1)[0]
    del batch
    pool.check()
    assert pool.stats().blocks_used == 0
