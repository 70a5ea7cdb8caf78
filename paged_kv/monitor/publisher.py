"""Shows the pools of this process to other processes of the same user.

A thread waits at a Unix socket of the runtime folder, and sends a view of the open pools to
whoever connects, as `paged-kv stats` does. There is no port. Only for a view do pools stand still,
for some microseconds while references are copied.

PAGED_KV_PUBLISH=0 shows nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paged_kv.monitor.pool_views import view_process
from paged_kv.monitor.process_view import ProcessView
from paged_kv.monitor.processes import make_runtime_folder, remove_stale, runtime_folder
from paged_kv.pool.page_pool import open_pools

logger = logging.getLogger("paged_kv")

# How often the thread looks whether somebody has deleted its socket.
CHECK_S = 2.0
# A client that reads nothing keeps the others waiting no longer than this.
_SEND_S = 1.0


class Publisher:
    """Sends what `view` returns to whoever connects, from a thread that `start` starts.

    A process that is forked from this one shows nothing until `start` is called there.
    """

    def __init__(self, view: Callable[[], ProcessView]) -> None:
        self._view = view
        self._busy = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._listening: socket.socket | None = None
        # A fork while the thread holds a pool's lock would leave that lock held for ever.
        os.register_at_fork(
            before=lambda: self._busy.acquire(),
            after_in_parent=lambda: self._busy.release(),
            after_in_child=self._begin_process,
        )
        atexit.register(self.stop)

    def start(self) -> None:
        """Answer from now on, until the process ends.

        Raises:
            ValueError: PAGED_KV_PUBLISH is no number from 0 on.
        """
        if self._thread is None and is_wanted():
            self._thread = threading.Thread(
                target=self._run, args=(self._is_over,), name="paged-kv", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Answer no longer, and remove the socket."""
        self._is_over.set()
        with self._busy:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
                self._path = None

    def answer(self, connection: socket.socket) -> None:
        """Send the present view.

        Raises:
            OSError: whoever has connected does not read it.
        """
        with self._busy:
            view = self._view()
        connection.settimeout(_SEND_S)
        connection.sendall(json.dumps(view.as_dict()).encode())
        # A process that was forked meanwhile may hold this connection too.
        connection.shutdown(socket.SHUT_WR)

    def _begin_process(self) -> None:
        """Forget the parent's thread and socket, which would seem to live for as long as this
        process."""
        if self._listening is not None:
            self._listening.close()
        self._busy = threading.Lock()
        self._is_over = threading.Event()
        self._thread = self._path = self._listening = None

    def _run(self, is_over: threading.Event) -> None:
        try:
            path = runtime_folder() / f"{os.getpid()}.sock"
            remove_stale()
            while self._listens(path, is_over):
                self._answer_next()
        except OSError as error:
            logger.info("cannot show the pools of this process: %s", error)

    def _listens(self, path: Path, is_over: threading.Event) -> bool:
        """Make the socket, anew if somebody has deleted it; false if all is over."""
        with self._busy:
            if is_over.is_set():
                return False
            if self._path is None or not path.exists():
                if self._listening is not None:
                    self._listening.close()
                make_runtime_folder(path.parent)
                path.unlink(missing_ok=True)  # of an earlier process with this number
                self._listening = socket.socket(socket.AF_UNIX)
                self._listening.settimeout(CHECK_S)
                self._listening.bind(str(path))
                self._listening.listen()
                self._path = path
            return True

    def _answer_next(self) -> None:
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except TimeoutError:
            return
        except OSError:  # too many files are open, for example
            self._is_over.wait(CHECK_S)
            return
        with connection, suppress(OSError):
            self.answer(connection)


def is_wanted() -> bool:
    """Whether PAGED_KV_PUBLISH lets others see this process. Other numbers from 0 on were seconds
    between looks, and count as 1 now, with a warning.

    Raises:
        ValueError: it is no such number.
    """
    text = os.environ.get("PAGED_KV_PUBLISH") or "1"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            "PAGED_KV_PUBLISH must be 0, so that `paged-kv stats` does not see this process, or 1, "
            f"got {text!r}"
        )
    if seconds not in (0, 1):
        logger.warning(
            "PAGED_KV_PUBLISH=%s has no seconds between looks any more: set 1, which does nothing "
            "until somebody looks",
            text,
        )
    return seconds > 0


publisher = Publisher(lambda: view_process(open_pools.items()))
