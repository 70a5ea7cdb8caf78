"""Prints tables of rich. Needs the extra "tables"."""

from typing import Any

from rich.console import Console


class PlainConsole(Console):
    """Shows texts as they are: command lines and errors may hold what looks like markup. A closed
    pipe raises BrokenPipeError, as from `print`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
