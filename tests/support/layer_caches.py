"""The caches of all layers of a batch, and mlx-lm's operations on them."""

from collections.abc import Iterator
from contextlib import contextmanager

from paged_kv import PagedKVCache, PagePool, Sequence


def caches_of(pool: PagePool, sequences: int = 1) -> list[PagedKVCache]:
    """A cache for each layer of a pool, of so many new sequences."""
    shared = [Sequence(pool) for _ in range(sequences)]
    return [PagedKVCache(pool, layer, list(shared)) for layer in range(pool.num_layers)]


@contextmanager
def ragged_step(layers: list[PagedKVCache], lengths: list[int]) -> Iterator[None]:
    """Prepare a step as long as its longest sequence; shorter sequences have padding on the
    right."""
    longest = max(lengths)
    for cache in layers:
        cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    try:
        yield
    finally:
        for cache in layers:
            cache.finalize()
