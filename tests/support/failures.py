"""Lets the n-th of the calls of a step fail."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagePool
from paged_kv.kernels.pages.errors import ThreadConflict

# Calls that may fail, of the backend and of MLX.
OF_BACKEND = ("new_slab", "begin", "write", "copy", "gather", "attend")
OF_MLX = ("eval", "async_eval", "synchronize")
ERRORS: list[type[BaseException]] = [
    MemoryError,
    RuntimeError,
    KeyboardInterrupt,
    OSError,
    ThreadConflict,
]


class Failures:
    """Raises an error at one of the calls that may fail.

    Attributes:
        left: calls until then; none fails while it is negative.
        error: the error.
        is_late: whether the call does its work before it fails.
        lasts: whether all later calls fail too.
        calls: the names of the calls until now.
    """

    def __init__(self) -> None:
        self.left = -1
        self.error: type[BaseException] = MemoryError
        self.is_late = self.lasts = False
        self.calls: list[str] = []

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def calling(*args: Any, **options: Any) -> Any:
            if self.left < 0:
                return call(*args, **options)
            self.calls.append(name)
            fails = self.left == 0
            if not (fails and self.lasts):
                self.left -= 1
            if fails and self.is_late:
                call(*args, **options)
            if fails:
                raise self.error
            return call(*args, **options)

        return calling


@contextmanager
def failing_calls(patch: pytest.MonkeyPatch) -> Iterator[Failures]:
    """Let all those calls be such as may fail."""
    found = Failures()
    backend = type(PagePool(1, max_bytes="1MB").backend)
    for owner, names in ((backend, OF_BACKEND), (mx, OF_MLX)):
        for name in names:
            failing = found.wrap(name, getattr(owner, name))
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            patch.setattr(owner, name, staticmethod(failing) if is_static else failing)
    gc.collect()
    gc.freeze()  # Collecting takes less time than a step then.
    yield found
    gc.unfreeze()
