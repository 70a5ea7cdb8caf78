"""The members of a cache that mlx-lm uses for batches, compared with its own `BatchKVCache`."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from paged_kv import PagedKVCache, PagePool, PoolExhausted, Sequence

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
    sequence = Sequence(pool)
    layers = [PagedKVCache(pool, layer, [sequence]) for layer in range(LAYERS)]
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


def test_merge_forks_and_leaves_the_originals_as_they_are(pool: PagePool) -> None:
    originals = [sequence_of(pool, tokens, tokens) for tokens in (300, 5, 256)]
    before = [row(layer, 0) for original in originals for layer in original]
    used = pool.stats().blocks_used
    batch = merged(originals)
    assert lengths(batch) == [[300, 5, 256]] * LAYERS
    assert (pool.stats().blocks_used, pool.stats().blocks_shared) == (used, used)
    assert [row(batch[0], index) for index in range(3)] == before[::LAYERS]
    write(batch, random_step(2, 9, batch=3))
    assert [row(layer, 0) for original in originals for layer in original] == before
    # The two last blocks that were not full were copied; the sequence that ended with a full block
    # began a new one.
    assert (pool.stats().cow_copies, pool.stats().blocks_used) == (2, used + 3)


def test_layers_of_a_row_stay_together(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 3), sequence_of(pool, 4)])
    extracted = each(batch, "extract", 1)
    for first, second in (batch, extracted, copy.deepcopy(batch)):
        assert first.sequences == second.sequences


def test_one_cache_twice_in_a_batch_gives_two_rows_of_their_own(pool: PagePool) -> None:
    original = sequence_of(pool, 10)
    batch = merged([original, original])
    write(batch, random_step(1, 5, batch=2))
    rows = [row(batch[1], index)[0] for index in range(2)]
    assert rows[0] != rows[1]
    assert row(original[1], 0)[0] == [head[:10] for head in rows[0]]


def test_rows_read_what_a_batch_of_stock_caches_reads(pool: PagePool) -> None:
    sizes = (30, 7, 260)
    batch = merged([sequence_of(pool, tokens, tokens) for tokens in sizes])
    stock = BatchKVCache.merge([stock_like(tokens, tokens) for tokens in sizes])
    for tokens in (1, 3):
        step = random_step(tokens, tokens, batch=3)
        for ours, theirs in zip(
            batch[0].update_and_fetch(*step), stock.update_and_fetch(*step), strict=True
        ):
            assert mx.array_equal(ours, theirs)
        assert mx.array_equal(batch[0].offset, stock.offset)
        assert batch[0].size() == stock.size()


def test_extend_takes_the_other_rows_over(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 300, 1), sequence_of(pool, 5, 2)])
    other = merged([sequence_of(pool, 270, 3)])
    gc.collect()
    expected = [row(batch[1], 0), row(batch[1], 1), row(other[1], 0)]
    used = pool.stats().blocks_used
    for cache, more in zip(batch, other, strict=True):
        cache.extend(more)
    assert [row(batch[1], index) for index in range(3)] == expected
    assert (pool.stats().blocks_used, pool.stats().blocks_shared) == (used, 0)
    assert mx.array_equal(batch[0].offset, mx.array([300, 5, 270]))


def test_extend_by_itself_gives_forks(pool: PagePool) -> None:
    batch = sequence_of(pool, 5)
    for cache in batch:
        cache.extend(cache)
    write(batch, random_step(1, 5, batch=2))
    assert lengths(batch) == [[6, 6]] * LAYERS
    assert batch[0].sequences == batch[1].sequences


@pytest.mark.parametrize("as_indices", [list, mx.array])
def test_filter_keeps_rows_and_frees_the_others(
    pool: PagePool, as_indices: Callable[[list[int]], Any]
) -> None:
    batch = merged([sequence_of(pool, tokens, tokens) for tokens in (300, 5, 600)])
    gc.collect()
    expected = [row(batch[0], 2), row(batch[0], 0)]
    each(batch, "filter", as_indices([2, 0]))
    assert [row(batch[0], index) for index in range(2)] == expected
    assert pool.stats().blocks_used == 5
    each(batch, "filter", as_indices([]))
    assert pool.stats().blocks_used == 0
    assert batch[0].empty()


def test_a_row_that_is_kept_twice_is_forked(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 5), sequence_of(pool, 6)])
    each(batch, "filter", [1, 1])
    write(batch, random_step(1, 3, batch=2))
    assert row(batch[1], 0) != row(batch[1], 1)
    assert lengths(batch) == [[7, 7]] * LAYERS


def test_an_index_out_of_range_changes_nothing(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 5), sequence_of(pool, 6)])
    for name, argument in (("filter", [0, 2]), ("extract", 2)):
        with pytest.raises(IndexError):
            each(batch, name, argument)
    assert lengths(batch) == [[5, 6]] * LAYERS


def test_extract_gives_a_single_cache_that_goes_its_own_way(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 300, 1), sequence_of(pool, 5, 2)])
    single = each(batch, "extract", 0)
    before = row(batch[0], 0)
    assert single[0].offset == 300
    write(single, random_step(3, 7))
    assert row(batch[0], 0) == before
    write(batch, random_step(1, 8, batch=2))
    assert [single[0].offset, mx.array(batch[0].offset).tolist()] == [303, [301, 6]]


def test_deepcopy_of_a_batch_forks_every_row(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 300, 1), sequence_of(pool, 5, 2)])
    before = [row(batch[1], index) for index in range(2)]
    fork = copy.deepcopy(batch)
    write(fork, random_step(4, 3, batch=2))
    assert [row(batch[1], index) for index in range(2)] == before
    assert lengths(fork) == [[304, 9]] * LAYERS


def test_right_padding_is_not_stored_and_reads_as_with_stock(pool: PagePool) -> None:
    """Sequences that already hold some tokens read prompts of 11, 2 and 0 tokens in steps of 4."""
    sizes, prompt = (3, 250, 0), [11, 2, 0]
    batch = merged([sequence_of(pool, tokens, tokens) for tokens in sizes])
    stock = BatchKVCache.merge([stock_like(tokens, tokens) for tokens in sizes])
    padding = [max(prompt) - tokens for tokens in prompt]
    each(batch, "prepare", lengths=prompt, right_padding=padding)
    stock.prepare(lengths=prompt, right_padding=padding)
    for number, tokens in enumerate((4, 4, 3)):
        assert mx.array_equal(mask_of(batch, tokens), stock.make_mask(tokens))
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


def test_padding_is_in_no_page(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 1, 1), sequence_of(pool, 1, 2)])
    each(batch, "prepare", lengths=[600, 3], right_padding=[0, 597])
    write(batch, random_step(600, 5, batch=2))
    each(batch, "finalize")
    gc.collect()
    assert pool.stats().blocks_used == 3 + 1


def test_right_padding_without_lengths_is_trimmed_at_the_end(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 1, 1), sequence_of(pool, 1, 2)])
    each(batch, "prepare", right_padding=[0, 3])
    write(batch, random_step(5, 5, batch=2))
    each(batch, "finalize")
    assert lengths(batch) == [[6, 3]] * LAYERS
    assert row(batch[0], 1)[0] == row(batch[1], 1)[0]


def test_left_padding_is_skipped_and_gives_negative_offsets(pool: PagePool) -> None:
    sequences = [Sequence(pool), Sequence(pool)]
    batch = [PagedKVCache(pool, layer, list(sequences)) for layer in range(LAYERS)]
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


def test_a_new_cache_is_still_new_when_a_batch_does_not_fit() -> None:
    page_bytes = 256 * sum(part.nbytes for part in random_step(1, 1))
    pool = PagePool(1, max_bytes=4 * page_bytes)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    with pytest.raises(PoolExhausted):
        cache.update_and_fetch(*random_step(300, 1, batch=3))
    assert cache.offset == 0
    cache.update_and_fetch(*random_step(300, 1))
    assert cache.offset == 300


def test_left_padding_is_refused_where_it_would_lie_between_tokens(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 5, 1), sequence_of(pool, 9, 2)])
    before = row(batch[0], 0)
    for cache in batch:
        with pytest.raises(ValueError, match="sequence 0 has 5 and was given 4: pad on the right"):
            cache.prepare(left_padding=[4, 0])
    write(batch, random_step(2, 5, batch=2))
    assert lengths(batch) == [[7, 11]] * LAYERS
    assert [held[:5] for held in row(batch[0], 0)[0]] == [held[:5] for held in before[0]]


def test_masks_of_a_batch_are_those_of_a_batch_of_stock_caches(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 9), sequence_of(pool, 4)])
    stock = BatchKVCache.merge([stock_like(9), stock_like(4)])
    for tokens in (1, 3):
        for window in (None, 5):
            ours = mask_of(batch, tokens, window)
            assert mx.array_equal(ours, stock.make_mask(tokens, window_size=window))


def test_trim_per_sequence_equals_trimming_each_alone(pool: PagePool) -> None:
    sizes, counts = (300, 40, 5, 8), [60, 0, 5, 99]
    batch = merged([sequence_of(pool, tokens, tokens) for tokens in sizes])
    alone = [sequence_of(pool, tokens, tokens) for tokens in sizes]
    assert each(batch, "trim_per_sequence", mx.array(counts)) == [[60, 0, 5, 8]] * LAYERS
    assert [each(layers, "trim", n)[0] for layers, n in zip(alone, counts, strict=True)] == [
        60,
        0,
        5,
        8,
    ]
    assert lengths(batch) == [[240, 40, 0, 0]] * LAYERS
    step = random_step(2, 3, batch=4)
    write(batch, step)
    for index, layers in enumerate(alone):
        write(layers, (step[0][index : index + 1], step[1][index : index + 1]))
        assert row(batch[1], index) == row(layers[1], 0)


def test_a_trimmed_batch_is_filtered_extended_extracted_and_merged(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, tokens, tokens) for tokens in (300, 40, 7)])
    each(batch, "trim_per_sequence", [50, 40, 1])
    single = each(batch, "extract", 0)
    each(batch, "filter", [2, 0])
    again = merged([single, sequence_of(pool, 12, 12)])
    for cache, more in zip(batch, again, strict=True):
        cache.extend(more)
    write(batch, random_step(1, 4, batch=4))
    assert lengths(batch) == [[7, 251, 251, 13]] * LAYERS
    expected = random_step(300, 300)[0][0, :, :250].tolist()
    assert [[head[:250] for head in row(batch[1], index)[0]] for index in (1, 2)] == [expected] * 2


def test_uniform_counts_equal_trim(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, tokens) for tokens in (300, 40)])
    other = copy.deepcopy(batch)
    assert each(batch, "trim", 50) == [50] * LAYERS
    assert each(other, "trim_per_sequence", [50, 50]) == [[50, 40]] * LAYERS
    assert lengths(batch) == lengths(other) == [[250, 0]] * LAYERS


@pytest.mark.parametrize(
    ("counts", "message"),
    [([1], r"one count per sequence \(2\), got 1"), ([1, -2], "not negative, got -2")],
)
def test_bad_counts_change_nothing(pool: PagePool, counts: list[int], message: str) -> None:
    batch = merged([sequence_of(pool, 5), sequence_of(pool, 6)])
    with pytest.raises(ValueError, match=message):
        batch[0].trim_per_sequence(counts)
    assert lengths(batch) == [[5, 6]] * LAYERS


def test_caches_of_other_pools_layers_or_classes_are_not_batched(pool: PagePool) -> None:
    ours, theirs = sequence_of(pool, 5), sequence_of(PagePool(LAYERS, max_bytes=1 << 20), 5)
    stock: Any = stock_like(5)
    for other, message in (
        (theirs[0], r"layer 0 of PagePool .* and layer 0 of PagePool .* with one factory"),
        (ours[1], r"got layer 0 of .* and layer 1 of"),
        (stock, "cannot be batched with a KVCache"),
    ):
        with pytest.raises(ValueError, match=message):
            PagedKVCache.merge([ours[0], other])
        with pytest.raises(ValueError, match=message):
            ours[0].extend(other)
    assert lengths(ours) == [[5]] * LAYERS
    with pytest.raises(ValueError, match="at least one cache"):
        PagedKVCache.merge([])


@pytest.mark.parametrize("name", ["left_padding", "lengths", "right_padding"])
def test_padding_of_another_batch_is_refused(pool: PagePool, name: str) -> None:
    batch = merged([sequence_of(pool, 5), sequence_of(pool, 6)])
    with pytest.raises(ValueError, match=f"{name} needs one number per sequence"):
        batch[0].prepare(**{name: [1, 2, 3]})


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


def test_operations_on_lists_touch_no_page(pool: PagePool) -> None:
    originals = [sequence_of(pool, 600, seed) for seed in range(4)]
    before = pool.stats()
    batch = merged(originals)
    each(batch, "extract", 2)
    each(batch, "filter", [0, 3])
    copy.deepcopy(batch)
    gc.collect()
    after = pool.stats()
    assert (after.blocks_used, after.bytes_mapped, after.cow_copies) == (
        before.blocks_used,
        before.bytes_mapped,
        0,
    )


def test_everything_is_freed_with_the_last_view(pool: PagePool) -> None:
    batch = merged([sequence_of(pool, 300), sequence_of(pool, 5)])
    extracted = batch[1].extract(0)
    del batch
    gc.collect()
    assert pool.stats().blocks_used == 2
    del extracted
    pool.check()
    assert pool.stats().blocks_used == 0


def test_a_new_cache_takes_a_batch_and_layers_stay_together(pool: PagePool) -> None:
    sequence = Sequence(pool)
    batch = [PagedKVCache(pool, layer, [sequence]) for layer in range(LAYERS)]
    for tokens in (300, 1):
        write(batch, random_step(tokens, tokens, batch=3))
    assert lengths(batch) == [[301] * 3] * LAYERS
    assert batch[0].sequences == batch[1].sequences
    assert row(batch[1], 2)[0] != row(batch[1], 1)[0]
    with pytest.raises(ValueError, match="layer 0 holds 3 sequences, got a batch of 2"):
        batch[0].update_and_fetch(*random_step(1, 1, batch=2))
    del batch, sequence
    pool.check()
    assert pool.stats().blocks_used == 0
