"""Takes a step of one layer through its pages."""

import mlx.core as mx

from paged_kv import PagedKVCache


def attended(cache: PagedKVCache, step: mx.array, *, scale: float = 1.0) -> mx.array:
    """What a step [batch, 1, tokens, dim] of keys, which are its values and queries too, attends to
    in the pages, [batch, 1, tokens, dim]."""
    mask = cache.make_mask(step.shape[2])
    keys, values = cache.update_and_fetch(step, step)
    assert keys.read is values.read
    output = keys.read.attend(step, mask, scale=scale)
    assert output is not None
    mx.eval(output)
    return output
