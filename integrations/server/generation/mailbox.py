"""A queue of commands from other threads to one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

Command = Callable[[], None]


class Mailbox:
    """Commands in the order of their arrival."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._news = threading.Condition()

    def put(self, *commands: Command) -> None:
        """Add commands, which `take` returns together; any thread may call this."""
        with self._news:
            self._commands += commands
            self._news.notify()

    def take(self, *, wait: bool) -> list[Command]:
        """Take all queued commands; with `wait`, wait for at least one."""
        with self._news:
            while wait and not self._commands:
                self._news.wait()
            commands, self._commands = self._commands, []
        return commands
