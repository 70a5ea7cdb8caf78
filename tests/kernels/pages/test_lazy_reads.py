"""A lazy read keeps its values, whatever is written before it is computed.

The reads come after `write_back`: a step that is not in its pages yet is read as it was given.
Sequences keep their first token: the pool frees the memory of a slab without blocks, and the next
step would be written elsewhere.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence

pytestmark = pytest.mark.usefixtures("backend")


def step(tokens: int, seed: int, heads: int = 2) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, heads, tokens, 16), key=mx.random.key(seed))
    return keys, keys + 1


def new_cache() -> PagedKVCache:
    pool = PagePool(1, max_bytes=1 << 24)
    return PagedKVCache(pool, 0, [Sequence(pool)])


def write_back(cache: PagedKVCache) -> None:
    """Write the latest step to its pages."""
    cache.pool.groups[0].pages[0].write_back()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("tokens", [3, 256, 600])
def test_arrays_that_are_held(heads: int, tokens: int) -> None:
    """Of one head and whole pages, so these could be views of the slab."""
    cache = new_cache()
    given = step(tokens, 1, heads)
    cache.update_and_fetch(*given)
    write_back(cache)
    found = cache.keys_and_values()
    cache.trim(tokens - 1)
    cache.update_and_fetch(*step(tokens, 2, heads))
    write_back(cache)
    for array, expected in zip(found, given, strict=True):
        assert mx.array_equal(array, expected)


def test_arrays_of_a_function_that_mlx_traces_cost_no_slab() -> None:
    """Nobody can compute them before the slab of what they read goes."""
    cache = new_cache()
    cache.update_and_fetch(*step(300, 1))
    write_back(cache)
    pages = cache.pool.groups[0].pages[0]

    def traced(scale: mx.array) -> mx.array:
        found = scale * cache.keys_and_values()[0]
        pages.lazy_reads.watch([found], pages.lazy_reads.noted[0].metadata)
        for slab in list(pages.slabs):
            pages.unmap_slab(slab)
        return found

    traced_once: Any = mx.compile(traced)
    assert traced_once(mx.array(2.0)).shape == (1, 2, 300, 16)
    assert not pages.slabs


def test_arrays_that_stand_for_their_keys_when_those_are_gone() -> None:
    cache = new_cache()
    given, last = step(300, 1), step(1, 2)
    cache.update_and_fetch(*given)
    transposed = cache.update_and_fetch(*last)[0].swapaxes(2, 3)
    cache.trim(300)
    cache.update_and_fetch(*step(300, 3))
    write_back(cache)
    expected = mx.concatenate([given[0], last[0]], axis=2).swapaxes(2, 3)
    assert mx.array_equal(mx.array(transposed), expected)


def test_another_threads_arrays_wait_for_it() -> None:
    """Until that thread writes: other threads that write to other pages meanwhile do not forget
    them."""
    cache = new_cache()
    given = step(3, 1)
    cache.update_and_fetch(*given)
    write_back(cache)
    kept: list[Any] = []

    def overwrite() -> bool:
        cache.trim(2)
        cache.update_and_fetch(*step(5, 3))
        write_back(cache)
        return bool(mx.array_equal(kept[0], given[0]))

    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: kept.append(cache.keys)).result()
        PagedKVCache(cache.pool, 0, [Sequence(cache.pool)]).update_and_fetch(*step(2, 2))
        assert other.submit(overwrite).result()


def test_what_attention_has_read_is_not_gathered() -> None:
    cache = new_cache()
    keys, values = cache.update_and_fetch(*step(3, 1))
    keys.read.attend(mx.ones((1, 4, 3, 16)), "causal", scale=1.0)
    del keys, values
    reads = cache.pool.groups[0].pages[0].lazy_reads
    assert not reads.waiting()
    cache.keys_and_values()
    assert len(set(map(id, reads.waiting()))) == 2
    keys, values = cache.update_and_fetch(*step(3, 2))
    assert len(reads.waiting()) == 2
    keys.read.attend(mx.ones((1, 4, 3, 16)), "causal", scale=1.0)
    del keys, values
    assert not reads.waiting()
