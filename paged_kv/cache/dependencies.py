"""Keeps arrays in the graph that a model makes its cache depend on.

Models assign `cache.keys = mx.depends(cache.keys, x)` so that whoever computes the cache also
computes x: a message to another rank, or keys that no output of this step needs. Pages are no part
of the graph. So the cache keeps a number that depends on x, and nobody gathers the keys for it.

Some models assign other arrays, only to bound the graph. What other code assigns would be new
contents, which pages do not get so: it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from paged_kv.recognition.latent_arrays import ReadArray
from paged_kv.steps.arrays import PagedKeys, PagedValues, contents_refused
from paged_kv.steps.read import PagedRead


class _Thread(threading.local):
    """`in_model`: whether this thread is within a call of a model."""

    in_model = False


this_thread = _Thread()


class DependentArray(ReadArray):
    """Keys or values of a cache, made to depend on other arrays. Gathered when computed.

    Attributes:
        read: the read of the keys or values.
        dependencies: the other arrays.
    """

    read: PagedRead
    dependencies: tuple[mx.array, ...]


def depending(
    array: PagedKeys | PagedValues | DependentArray, dependencies: Iterable[mx.array]
) -> DependentArray:
    """Keys or values that depend on these arrays too."""
    added = tuple(dependencies)
    result = DependentArray(mx.depends(mx.array(array), list(added)))
    earlier = array.dependencies if isinstance(array, DependentArray) else ()
    result.read, result.dependencies = array.read, (*earlier, *added)
    return result


def require_dependency(assigned: mx.array) -> None:
    """Raise a ValueError if an assigned array would be new contents."""
    is_known = isinstance(assigned, DependentArray) and not assigned.is_changed
    if not (is_known or this_thread.in_model):
        raise contents_refused()


def dependency_on(assigned: mx.array) -> mx.array:
    """A number that depends on whatever an assigned array depends on, except on its pages."""
    if not isinstance(assigned, DependentArray) or assigned.is_changed:
        return joined([assigned])
    assigned.read.leave_unread()
    return joined(assigned.dependencies)


def joined(arrays: Iterable[mx.array]) -> mx.array:
    """A number that depends on all these arrays. Once computed it holds none of them, so that MLX
    can write to their memory."""
    number: mx.array = mx.depends(mx.array(0), list(arrays))
    return number


def joined_of(dependencies: Iterable[Any]) -> mx.array | None:
    """One number for several caches' dependencies, each of which may be None."""
    found = [each for each in dependencies if each is not None]
    return joined(found) if found else None
