"""Finds what a model consists of: the arrays that its recordings take as arguments, and all else
that its results depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

# Have attributes, but none that a model's step is made of.
_NOT_OF_A_MODEL = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial)

Replaced = list[tuple[Any, Any]]
"""What a model replaced while it was traced, and what by."""


class ModelContents:
    """The places of a model's arrays. A recording takes the arrays as arguments, so it computes
    with those that were changed in place, and keeps none alive that was replaced."""

    def __init__(self, model: Module) -> None:
        self._containers = containers(model)
        self._places = [
            (container, key)
            for container in self._containers
            for key, value in _items(container)
            if isinstance(value, mx.array)
        ]

    def arrays(self) -> list[mx.array]:
        """The arrays, as they are now.

        Raises:
            LookupError: one was removed since.
        """
        return [container[key] for container, key in self._places]

    @contextmanager
    def with_arrays(self, arrays: Iterable[mx.array]) -> Iterator[Replaced]:
        """Let these arrays stand in the places of the model's own, and put back whatever is
        replaced within; the list tells it afterwards."""
        before = [_copy(each) for each in self._containers]
        replaced: Replaced = []
        try:
            for (container, key), array in zip(self._places, arrays, strict=True):
                container[key] = array
            within = [list(values(each)) for each in self._containers]
            try:
                yield replaced
            finally:
                for was, container in zip(within, self._containers, strict=True):
                    replaced += _differences(was, list(values(container)))
        finally:
            for container, contents in zip(self._containers, before, strict=True):
                _restore(container, contents)


def are_equal(replaced: Replaced) -> mx.array:
    """Whether a model replaced things by equal ones only, boolean []: some models replace an array
    by an equal one whenever they run. In a trace it is a part of the graph."""
    found = mx.array(True)
    for one, other in replaced:
        found = found & _is_equal(one, other)
    return found


def containers(model: Module) -> list[Any]:
    """The dictionaries and lists that make up a model, each once: its modules, their attributes,
    and those of objects in them, such as `model.args`."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts = [value] if isinstance(value, dict | list | tuple) else []
        if has_attributes(value):
            parts.append(vars(value))
        for part in parts:
            waiting += values(part)
        found += [part for part in parts if not isinstance(part, tuple)]
    return found


def has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _NOT_OF_A_MODEL)


def values(container: Any) -> Iterable[Any]:
    return dict.values(container) if isinstance(container, dict) else container


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return dict.items(container) if isinstance(container, dict) else enumerate(container)


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _restore(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        container.clear()
        dict.update(container, contents)  # a module's own does more
    else:
        container[:] = contents


def _differences(was: list[Any], now: list[Any]) -> Replaced:
    if len(was) != len(now):
        return [(was, now)]
    return [(one, other) for one, other in zip(was, now, strict=True) if one is not other]


def _is_equal(one: Any, other: Any) -> mx.array | bool:
    if isinstance(one, mx.array) and isinstance(other, mx.array):
        return mx.array_equal(one, other) & (one.dtype == other.dtype)
    is_setting = isinstance(one, bool | int | float | str)
    return is_setting and type(one) is type(other) and one == other
