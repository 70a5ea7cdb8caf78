"""Notices when anything that a model consists of is replaced, for next to nothing in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.sequences.recorded_step import NotRecordable

# Larger arrays that were replaced count as changed: no model replaces such in each step.
SMALL_BYTES = 1 << 20


class ModelContents:
    """What a model consists of: arrays, modules and settings, as they were.

    MLX replaces arrays and never changes them, so the same array has the same contents. Some models
    replace a small array by an equal one whenever they run.
    """

    def __init__(self, model: Module) -> None:
        self._containers = list(_containers(model, set()))
        # Views show what is replaced later.
        self._views = [
            dict.values(each) if isinstance(each, dict) else each for each in self._containers
        ]
        self._replaced: list[tuple[Any, Any]] = []
        self._keep()

    def has_changed(self) -> bool:
        """Whether anything was replaced, other than by what is equal."""
        if self._is_same():
            return False
        if not self._has_equal(list(self._differences())):
            return True
        self._keep()
        return False

    def restoring(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, after which everything is put back that it replaced."""

        def restored(*arguments: Any, **named: Any) -> Any:
            try:
                return call(*arguments, **named)
            finally:
                if not self._is_same():
                    self._replaced += self._differences()
                    self._restore()

        return restored

    def require_equal_replacements(self) -> None:
        """Check what `restoring` put back.

        Raises:
            NotRecordable: something was replaced by what is not equal.
        """
        replaced, self._replaced = self._replaced, []
        if not self._has_equal(replaced):
            raise NotRecordable("it replaces its own arrays or settings in each step")

    def _keep(self) -> None:
        self._kept = list(chain.from_iterable(self._views))
        self._copies = [
            dict(each) if isinstance(each, dict) else list(each) for each in self._containers
        ]

    def _is_same(self) -> bool:
        now = list(chain.from_iterable(self._views))
        return len(now) == len(self._kept) and all(map(is_, now, self._kept))

    def _differences(self) -> Iterator[tuple[Any, Any]]:
        """What was replaced, and what by."""
        now = list(chain.from_iterable(self._views))
        if len(now) != len(self._kept):
            yield self._kept, now
        for one, other in zip(self._kept, now, strict=False):
            if one is not other:
                yield one, other

    def _has_equal(self, pairs: list[tuple[Any, Any]]) -> bool:
        try:
            return all(_are_equal(one, other) for one, other in pairs)
        except RuntimeError:  # an array of a trace
            return False

    def _restore(self) -> None:
        for container, kept in zip(self._containers, self._copies, strict=True):
            if isinstance(container, dict):
                # Not the methods of modules, which do more.
                dict.clear(container)
                dict.update(container, kept)
            else:
                container[:] = kept


def _are_equal(one: Any, other: Any) -> bool:
    """Whether these are equal small arrays, or equal settings."""
    if not isinstance(one, mx.array) or not isinstance(other, mx.array):
        return (
            type(one) is type(other)
            and isinstance(one, bool | int | float | str)
            and (one == other)
        )
    alike = (one.shape, one.dtype) == (other.shape, other.dtype) and one.nbytes <= SMALL_BYTES
    return alike and bool(mx.array_equal(one, other))


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """The dictionaries and lists that make up a model, each once."""
    if id(value) in seen or not isinstance(value, dict | list | tuple):
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield value
    if isinstance(value, Module):
        yield vars(value)
    for part in list(dict.values(value)) if isinstance(value, dict) else value:
        yield from _containers(part, seen)
