"""Counts the arrays that a process holds."""

import gc

import mlx.core as mx


def live_arrays() -> int:
    """The `mx.array` objects that are alive, slabs of pages and weights among them.

    MLX lets Python's collector track its arrays. A buffer is counted once for each array that is a
    view of it. Arrays that only MLX itself refers to, as inputs of arrays that are not computed
    yet, are not counted.
    """
    gc.collect()
    return sum(isinstance(each, mx.array) for each in gc.get_objects())
