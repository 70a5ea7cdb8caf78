"""mlx-lm's kv_bits requantises the pages of the caches that the caller holds."""

import copy
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted
from paged_kv.cache.saved_state import page_formats
from tests.support.generation import assert_written_and_free
from tests.support.layer_caches import caches_of
from tests.support.state_machine.table_model import TableModel

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(430)]
HEAD = 32
PAGE_BYTES = 2 * 256 * HEAD * 4


def write(caches: list[PagedKVCache], count: int, head: int) -> None:
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, 1, count, head)) for _ in range(2)))


def test_what_is_converted_in_part_is_not_found_as_what_it_was() -> None:
    """The pool is full when a conversion begins, and has room for more tokens later."""
    model: Any = TableModel((None,))
    factory = PagedCacheFactory(model, max_bytes=8 * 4 * PAGE_BYTES // 2)
    (cache,), other = factory.make_cache(), factory.make_cache()
    model(mx.array([PROMPT[:300]]), cache=[cache])
    model(mx.array([[*PROMPT, *PROMPT, *PROMPT, *PROMPT[:246]]]), cache=other)
    with pytest.raises(PoolExhausted):
        cache.to_quantized(group_size=32, bits=4)
    del other
    model(mx.array([PROMPT[:300]]), cache=[cache])
    # The step began within a page, whose recoded copy lasts as long as the step.
    assert factory.stats().blocks_by_format == {"fp16": 3, "q8": 0, "q4": 1}
    factory.insert_cache(PROMPT[:300] * 2, [cache])
    assert factory.fetch_cache(PROMPT[:300] * 2)[1] == 0
    # A second request continues the conversion, and so does a fork's request.
    fork = copy.deepcopy(cache)
    for each in (fork, cache):
        each.to_quantized(group_size=32, bits=4)
        assert page_formats(factory.pool, 0, each.sequences[0]) == ["q8", "q4", "fp16"]
    del fork, each
    factory.clear()
    assert factory.stats().blocks_by_format == {"fp16": 1, "q8": 1, "q4": 1}
    del cache
    assert_written_and_free(factory)


def test_a_head_size_that_does_not_divide_is_refused_at_the_first_write() -> None:
    formats: list[Any] = ["q4", ("fp16", "q4"), "auto"]
    for page_format in formats:
        pool = PagePool(2, max_bytes=1 << 24, page_format=page_format)
        caches = caches_of(pool)
        write(caches[:1], 10, HEAD)
        with pytest.raises(ValueError, match="got 48"):
            write(caches[1:], 10, 48)
        assert ({cache.offset for cache in caches}, pool.stats().blocks_used) == ({0}, 0)
        pool.check()
