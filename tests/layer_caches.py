"""mlx-lm's operations on the caches of all layers of a batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from paged_kv import PagedKVCache


@contextmanager
def ragged_step(layers: list[PagedKVCache], lengths: list[int]) -> Iterator[None]:
    """A step as long as its longest row, of which each row has its length; padding after it."""
    longest = max(lengths)
    for cache in layers:
        cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    try:
        yield
    finally:
        for cache in layers:
            cache.finalize()
