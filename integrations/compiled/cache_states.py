"""Takes the arrays out of caches without pages, such as those of recurrent layers, and puts others
in their place."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map


def arrays_of(caches: Iterable[Any]) -> list[mx.array]:
    """The arrays among the attributes of these caches."""
    return [leaf for leaf in _leaves(caches) if isinstance(leaf, mx.array)]


def others_of(caches: Iterable[Any]) -> list[Any]:
    """The attributes that are no arrays, and the shapes and dtypes of those that are."""
    return [
        (leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf for leaf in _leaves(caches)
    ]


def copies_with(caches: Iterable[Any], arrays: Iterator[mx.array]) -> list[Any]:
    """Copies of these caches with the next arrays in the places of their own."""
    copies = [copy.copy(cache) for cache in caches]
    put(copies, arrays)
    return copies


def put(caches: Iterable[Any], arrays: Iterator[mx.array]) -> None:
    """Put the next arrays in the places of those of these caches."""

    def replaced(leaf: Any) -> Any:
        return next(arrays) if isinstance(leaf, mx.array) else leaf

    for cache in caches:
        vars(cache).update(tree_map(replaced, vars(cache)))


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        flat: Any = tree_flatten(vars(cache))
        for _, leaf in flat:
            yield leaf
