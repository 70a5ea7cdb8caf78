"""mlx-lm's operations on the caches of all layers of a batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from paged_kv import PagedKVCache


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
