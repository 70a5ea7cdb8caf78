"""Makes arrays that have a shape and a dtype, and that cannot be computed."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

# MLX's own, where attention replaces `mx.broadcast_to`: nothing looks for these arrays there.
_broadcast_to = mx.broadcast_to


def new_placeholder(dtype: mx.Dtype) -> mx.array:
    """A new scalar that cannot be computed: the argument of a traced function."""
    found: list[mx.array] = []

    def note(number: mx.array) -> mx.array:
        found.append(number)
        return number + 1

    mx.export_function(lambda _: None, note, mx.zeros((), dtype))
    return found[0]


_known_placeholder = cache(new_placeholder)


def placeholder(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array that cannot be computed: MLX raises a RuntimeError that it has no primitive."""
    return _broadcast_to(_known_placeholder(dtype), shape)
