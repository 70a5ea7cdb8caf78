"""Replaces one call in the `os` of a module."""

import os
from collections.abc import Callable, Collection
from typing import Any

# The system calls of a folder that count. Closing does not: it cleans up after faults.
CALLS = (
    *("open", "read", "write", "fsync", "rename", "unlink", "scandir", "listdir"),
    *("stat", "lstat", "fstat", "fstatvfs", "fchmod", "utime"),
)


class SystemCalls:
    """Replaces the module `os`.

    Args:
        number: which call does something else, counted from 1.
        instead: what is called before it.
        names: the calls that count.

    Attributes:
        count: calls so far.
        names_called: their names, in order.
    """

    def __init__(
        self, number: int, instead: Callable[[], object], names: Collection[str] = CALLS
    ) -> None:
        self.count = 0
        self.names_called: list[str] = []
        self._number = number
        self._instead = instead
        self._names = names

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in self._names:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            self.names_called.append(name)
            if self.count == self._number:
                self._instead()
            return found(*arguments, **named)

        return call
