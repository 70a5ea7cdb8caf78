"""Limits the bytes that all slabs of the pools that share a budget map together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakSet

Method = TypeVar("Method", bound=Callable[..., Any])


def require_positive(name: str, number: int) -> None:
    """Raise a ValueError with the argument's name unless `number` is a positive integer."""
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ValueError(f"{name} must be a positive integer, got {number!r}")


class Reclaims(Protocol):
    """Reclaims memory in a pool that shares a budget."""

    def reclaimable(self) -> int:
        """Bytes that `give_way` could give back. O(cached blocks)."""
        ...

    def give_way(self, fits: Callable[[], bool]) -> None:
        """Give back what no sequence needs, little by little, until another pool's needs fit."""
        ...


@dataclass
class ByteBudget:
    """Counts mapped bytes against a limit: `0 <= mapped <= max_bytes`, at all times.

    Allocators that share a budget also evict for each other. So the budget's lock guards
    look-ups, insertions, forks, trims and reservations from several threads.
    """

    max_bytes: int
    mapped: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)
    # Those of the pools that share it.
    reclaimers: WeakSet[Reclaims] = field(default_factory=WeakSet, repr=False, compare=False)
    # Release the memory of pools that were collected. Finalisers append to it, which may interrupt
    # anything, and `drain` calls them.
    abandoned: deque[Callable[[], None]] = field(default_factory=deque, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_positive("max_bytes", self.max_bytes)

    @property
    def left(self) -> int:
        """Bytes that can still be mapped."""
        return self.max_bytes - self.mapped

    def drain(self) -> None:
        """Release the memory of pools that were collected."""
        while self.abandoned:
            self.abandoned.popleft()()

    def take(self, nbytes: int) -> None:
        """Count `nbytes` as mapped; a negative number as unmapped."""
        assert 0 <= self.mapped + nbytes <= self.max_bytes, (nbytes, self)
        self.mapped += nbytes


def locked(method: Method) -> Method:
    """Make a method hold its object's `lock`, so that pools that share a budget take turns."""

    @wraps(method)
    def under_lock(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(Method, under_lock)
