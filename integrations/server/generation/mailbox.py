"""Commands from other threads to one that takes them when it can."""

from __future__ import annotations

import threading
from collections.abc import Callable

Command = Callable[[], None]


class Mailbox:
    """Commands in the order in which they came."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._news = threading.Condition()

    def put(self, *commands: Command) -> None:
        """Add commands, which `take` returns together; any thread may."""
        with self._news:
            self._commands += commands
            self._news.notify()

    def take(self, *, wait: bool) -> list[Command]:
        """What has come; it waits for something if that is asked."""
        with self._news:
            while wait and not self._commands:
                self._news.wait()
            commands, self._commands = self._commands, []
        return commands
