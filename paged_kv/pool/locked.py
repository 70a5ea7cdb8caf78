"""Serialises the calls of all pools that share a budget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class HasLock(Protocol):
    """An object with the lock of its budget."""

    @property
    def lock(self) -> threading.RLock: ...


Owner = TypeVar("Owner", bound=HasLock)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def locked(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Make a method hold its object's lock."""

    @wraps(method)
    def under_lock(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return under_lock
