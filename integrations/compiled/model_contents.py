"""Knows what a model consists of: the arrays that its recordings take as arguments, and all else
that they depend on, which it watches for next to nothing in each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.steps.recorded import NotRecordable

# Larger arrays that were replaced count as changed: no model replaces such in each step.
SMALL_BYTES = 1 << 20
# Have attributes, but none that a model's step is made of.
_NOT_OF_A_MODEL = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial)

Replaced = list[tuple[Any, Any]]
"""What a model replaced while it was traced, and what by."""


class ModelContents:
    """What a model consisted of when its steps were recorded, to find out whether it has changed.

    That is its modules, its settings and their classes. Settings are what is in attributes,
    dictionaries and lists of modules, and of objects in these, such as `model.args`.

    Arrays are not compared: a recording takes them as arguments. So a recording computes with
    arrays that were changed in place, and keeps none alive that was replaced.
    """

    def __init__(self, model: Module) -> None:
        found = _Contents()
        found.add(model)
        self._containers = found.containers
        self._places = [
            (container, key)
            for container in self._containers
            for key, value in _items(container)
            if isinstance(value, mx.array)
        ]
        self._owners = found.owners
        holders = {id(container) for container, _ in self._places}
        with_arrays = [each for each in self._containers if id(each) in holders]
        others = [each for each in self._containers if id(each) not in holders]
        classes = {base: None for each in self._owners for base in type(each).__mro__}
        # Views show what is replaced later.
        self._views = [_values(each) for each in others]
        self._views += [vars(each).values() for each in classes if each not in (object, dict)]
        self._views_with_arrays = [_values(each) for each in with_arrays]
        self._keep()

    def arrays(self) -> list[mx.array]:
        """The arrays, as they are now.

        Raises:
            LookupError: one was removed since.
        """
        return [container[key] for container, key in self._places]

    def has_changed(self) -> bool:
        """Whether anything but the contents of arrays was replaced, other than by what is
        equal."""
        if self._is_same():
            return False
        are_equal = (
            list(map(type, self._owners)) == self._types
            and _are_equal_settings(self._kept, self._now())
            and _are_equal_settings(self._kept_beside, self._beside_arrays())
        )
        if are_equal:
            self._keep()
        return not are_equal

    @contextmanager
    def restoring(self, arrays: Iterable[mx.array] | None = None) -> Iterator[Replaced]:
        """Put back whatever is replaced within; the list tells it afterwards. With `arrays`, they
        stand in the places of the model's own within."""
        before = [_copy(each) for each in self._containers]
        replaced: Replaced = []
        try:
            if arrays is not None:
                for (container, key), array in zip(self._places, arrays, strict=True):
                    _set(container, key, array)
            within = [list(_values(each)) for each in self._containers]
            try:
                yield replaced
            finally:
                for was, container in zip(within, self._containers, strict=True):
                    replaced += _differences(was, list(_values(container)))
        finally:
            for container, contents in zip(self._containers, before, strict=True):
                _restore(container, contents)

    def _keep(self) -> None:
        self._kept = self._now()
        self._types = list(map(type, self._owners))
        self._ids = self._ids_with_arrays()
        self._kept_beside = self._beside_arrays()

    def _is_same(self) -> bool:
        now, types = self._now(), map(type, self._owners)
        return (
            len(now) == len(self._kept)
            and all(map(is_, now, self._kept))
            and all(map(is_, types, self._types))
            and self._ids_with_arrays() == self._ids
        )

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(self._views))

    def _ids_with_arrays(self) -> list[int]:
        """The ids of what stands beside arrays, and of these: an array that has gone may give its
        id to another, and that is all the same."""
        return list(map(id, chain.from_iterable(self._views_with_arrays)))

    def _beside_arrays(self) -> list[Any]:
        """What stands beside arrays, and their class for each of these."""
        values = chain.from_iterable(self._views_with_arrays)
        return [mx.array if isinstance(each, mx.array) else each for each in values]


def require_equal(replaced: Replaced) -> None:
    """Check what a trace replaced; some models replace a small array by an equal one whenever they
    run.

    Raises:
        NotRecordable: something was replaced by what is not equal.
    """
    try:
        are_equal = all(_is_equal(one, other) for one, other in replaced)
    except RuntimeError:  # an array of the trace
        are_equal = False
    if not are_equal:
        raise NotRecordable("it replaces its own arrays or settings in each step")


class _Contents:
    """Gathers the dictionaries and lists that make up a model, each once, and the objects whose
    classes matter."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self.owners: list[Any] = []
        self._seen: set[int] = set()

    def add(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict | list | tuple):
            if not isinstance(value, tuple):
                self.containers.append(value)
            for part in list(dict.values(value)) if isinstance(value, dict) else value:
                self.add(part)
        if has_attributes(value):
            self.owners.append(value)
            self.containers.append(vars(value))
            for part in list(vars(value).values()):
                self.add(part)


def has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _NOT_OF_A_MODEL)


def _values(container: Any) -> Any:
    return dict.values(container) if isinstance(container, dict) else container


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return list(dict.items(container) if isinstance(container, dict) else enumerate(container))


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _set(container: Any, key: Any, value: Any) -> None:
    # Not the methods of modules, which do more.
    if isinstance(container, dict):
        dict.__setitem__(container, key, value)
    else:
        container[key] = value


def _restore(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, contents)
    else:
        container[:] = contents


def _differences(was: list[Any], now: list[Any]) -> Replaced:
    if len(was) != len(now):
        return [(was, now)]
    return [(one, other) for one, other in zip(was, now, strict=True) if one is not other]


def _is_equal(one: Any, other: Any) -> bool:
    """Whether these are equal small arrays, or equal settings."""
    if not isinstance(one, mx.array) or not isinstance(other, mx.array):
        return _is_equal_setting(one, other)
    alike = (one.shape, one.dtype) == (other.shape, other.dtype) and one.nbytes <= SMALL_BYTES
    return alike and bool(mx.array_equal(one, other))


def _are_equal_settings(kept: list[Any], now: list[Any]) -> bool:
    return len(kept) == len(now) and all(
        one is other or _is_equal_setting(one, other) for one, other in zip(kept, now, strict=True)
    )


def _is_equal_setting(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, bool | int | float | str) and (one == other)
