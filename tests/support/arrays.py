"""Makes and compares the arrays of tests."""

import mlx.core as mx
import numpy as np

from tests.support.dense_attention import Numbers


def normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """Random numbers, the same for a seed."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def numbers(array: mx.array) -> Numbers:
    """The numbers of an array of any floats."""
    return np.asarray(array.astype(mx.float32)).astype(np.float64)
