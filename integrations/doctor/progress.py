"""Tells how far an examination is, which takes a minute and ends with a summary."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(*, verbose: bool) -> Iterator[Callable[[object], None]]:
    """A call that takes each line as it is found: prints it if `verbose`; otherwise a terminal
    shows the latest one, until the end."""
    if verbose:
        yield lambda line: print(line, flush=True)
        print()
    elif sys.stderr.isatty():
        try:
            yield _show
        finally:
            _show("")
    else:
        yield lambda line: None


def _show(line: object) -> None:
    """Show a line in place of the one before, cut so that it does not wrap."""
    columns = shutil.get_terminal_size().columns - 1
    print(f"\r\x1b[K{str(line)[:columns]}", end="", file=sys.stderr, flush=True)
