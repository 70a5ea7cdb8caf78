"""What SIGTERM and SIGINT do to the process of a server.

Until the server serves, a signal ends the process at once, as nothing can be lost yet. Later the
first signal ends it in order, within a limit of time, and the second ends it at once. Neither
raises KeyboardInterrupt: in the middle of an import that leaves a lock held, and other threads wait
for it for ever.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def ending_at_once() -> AbstractContextManager[None]:
    """While entered, a signal ends the process, with the exit status that shells give to signals.

    The default action would not do: the first process of a container does not get it.
    """
    return _handling(_end_at_once)


def ending_in_order(end: Callable[[], object], within_s: float) -> AbstractContextManager[None]:
    """While entered, the first signal calls `end`, which begins the end and returns; it may be
    called between any two bytecodes. `within_s` seconds later the process ends with exit status 1,
    whatever its threads do. The second signal ends it at once."""

    def first(*_: Any) -> None:
        for each in SIGNALS:
            signal.signal(each, _end_at_once)
        # The thread that ends the process is no Python thread: it needs neither the interpreter's
        # lock nor an event loop that runs. It would first write where all threads are, which could
        # wait for ever for whoever reads standard error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(within_s, file=nowhere, exit=True)
        end()

    return _handling(first)


def ignored() -> AbstractContextManager[None]:
    return _handling(signal.SIG_IGN)


def _end_at_once(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    before = {each: signal.signal(each, handler) for each in SIGNALS}
    try:
        yield
    finally:
        for each, earlier in before.items():
            signal.signal(each, earlier)
