"""What an interrupt (Ctrl-C, SIGINT) does to a command.

It ends the command at once, with status 130 and without a word. Nothing is raised: in the middle of
an import, of C++ or of a destructor, a KeyboardInterrupt comes out as another error, or is lost.
Only a command with something to put right, such as a half-written file, lets the interrupt be
`raised`; a second one then ends the command at once.

This file imports nothing that takes long, because Python raises KeyboardInterrupt until
`end_at_interrupts` has been called.
"""

import _thread
import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

STATUS = 128 + signal.SIGINT

# How many interrupts raise KeyboardInterrupt before one ends the command, and how many have.
_most_raised = _raised = 0


def end_at_interrupts() -> None:
    """Let interrupts end this process from now on, unless it was started to ignore them, as shells
    do in the background. Call it once, in the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, _handle)
    # Python handles a signal when C++ returns to it, which may take minutes. The file descriptor
    # tells a thread at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _thread.start_new_thread(_watch, (reader,))
    # Exit handlers run in reverse order. Once this first one runs, the command has done its work.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


@contextmanager
def raised() -> Iterator[None]:
    """Let the first interrupt raise KeyboardInterrupt, so that `finally` and `with` clean up."""
    global _most_raised
    _most_raised = 1
    sys.unraisablehook, hook = _end_where_lost, sys.unraisablehook
    try:
        yield
    except Exception as error:
        if _raised:
            # C++ that calls Python makes another error of a KeyboardInterrupt.
            raise KeyboardInterrupt from error
        raise
    finally:
        _most_raised, sys.unraisablehook = _raised, hook


def end() -> NoReturn:
    """End this process as an interrupt does."""
    if os.isatty(2):
        os.write(2, b"\n")  # The shell's prompt begins a line of its own.
    os._exit(STATUS)


def _handle(*_: object) -> None:
    global _raised
    if _raised >= _most_raised:
        end()
    _raised += 1
    raise KeyboardInterrupt


def _watch(reader: int) -> None:
    interrupts = 0
    while True:
        number = os.read(reader, 1)[0]
        # The server has handlers of its own.
        if number == signal.SIGINT and signal.getsignal(number) is _handle:
            interrupts += 1
            if interrupts > _most_raised:
                end()


def _end_where_lost(unraisable: Any) -> None:
    """Ends the process where a destructor has lost a KeyboardInterrupt."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        end()
    sys.__unraisablehook__(unraisable)
