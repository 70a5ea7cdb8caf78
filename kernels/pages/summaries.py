"""Summarises the keys of a full page, so that a step can tell which tokens matter without reading
them.

A run is 32 tokens, an eighth of a page. Its summary holds the mean and the variance of each number
of its keys. If keys are normally distributed around their mean m, with variances v, the mean of
exp(q k) over them is exp(q m + q^2 v / 2): the weight that a query q gives to the run.
"""

import mlx.core as mx

# What is read or left out together. With 16, summaries take twice the memory and reading, and lose
# nearly as much; with 64 they lose more.
RUN_TOKENS = 32
# float16's largest number: a key may vary by more, and then matters to every query.
MOST = 65504.0


def summaries_of(keys: mx.array) -> mx.array:
    """Summaries, float16 [..., tokens / 32, 2 * dim], of keys [..., tokens, dim]: first the means,
    then the variances."""
    groups = mx.unflatten(keys.astype(mx.float32), -2, (-1, RUN_TOKENS))
    means = groups.mean(axis=-2)
    variances = mx.square(groups - means[..., None, :]).mean(axis=-2)
    return mx.clip(mx.concatenate([means, variances], axis=-1), -MOST, MOST).astype(mx.float16)
