"""A queue of commands from other threads to one thread."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Command = TypeVar("Command")


class Mailbox(Generic[Command]):
    """Commands in the order of their arrival."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._news = threading.Condition()

    def put(self, *commands: Command) -> None:
        """Add commands, which `take` returns together; any thread may call this."""
        with self._news:
            self._commands += commands
            self._news.notify()

    def take(self, *, wait: bool, seconds: float | None = None) -> list[Command]:
        """Take all queued commands; with `wait`, wait for at least one, for `seconds` at most."""
        with self._news:
            if wait:
                self._news.wait_for(lambda: self._commands, seconds)
            commands, self._commands = self._commands, []
        return commands
