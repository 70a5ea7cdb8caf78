"""Publishes the pools of this process to other processes of the same user.

A thread looks at the open pools twice a second and writes what has changed into a file of the
runtime folder, which `paged-kv stats` reads. There is no port, and the thread that generates does
nothing for it: its pool stands still for some microseconds while references are copied. How long
the thread sleeps grows with how long it took, so that it never takes more than one part in 200 of
the time.

PAGED_KV_PUBLISH says how many seconds to sleep at least (0.5 by default); 0 publishes nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable

from paged_kv.monitor.pool_views import view_process
from paged_kv.monitor.process_view import ProcessView
from paged_kv.monitor.published import SharedFile, remove_stale
from paged_kv.monitor.runtime_folder import make_runtime_folder, process_start
from paged_kv.pool.page_pool import open_pools

logger = logging.getLogger("paged_kv")

INTERVAL_S = 0.5
# The thread sleeps at least this many times as long as it was busy.
SLEEPS = 200


class Publisher:
    """Publishes what `view` returns, in a thread that `start` starts.

    A process that is forked from this one publishes nothing until `start` is called there.
    """

    def __init__(self, view: Callable[[], ProcessView]) -> None:
        self._view = view
        self._busy = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: SharedFile | None = None
        self._published: ProcessView | None = None
        self._started: str | None = None
        # A fork while the thread holds a pool's lock would leave that lock held for ever.
        os.register_at_fork(
            before=lambda: self._busy.acquire(),
            after_in_parent=lambda: self._busy.release(),
            after_in_child=self._begin_process,
        )
        atexit.register(self.stop)

    def start(self) -> None:
        """Publish from now on, until the process ends."""
        interval = interval_s()
        if self._thread is None and interval > 0:
            self._thread = threading.Thread(
                target=self._run, args=(interval, self._is_over), name="paged-kv", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop publishing, and remove the file."""
        self._is_over.set()
        with self._busy:
            if self._file is not None:
                self._file.remove()
                self._file = None

    def publish(self) -> None:
        """Publish the present view.

        Raises:
            OSError: the file cannot be written.
        """
        view = self._view()
        if self._file is None or not self._file.is_there():
            self._file = SharedFile(make_runtime_folder() / f"{os.getpid()}.json")
        elif self._published is not None and view.shows_the_same(self._published):
            return
        content = {**view.as_dict(), "started": self._started}
        self._file.write(json.dumps(content, separators=(",", ":")).encode())
        self._published = view

    def _begin_process(self) -> None:
        """Forget the thread and file of the parent process."""
        self._busy = threading.Lock()
        self._is_over = threading.Event()
        self._thread = self._file = self._published = self._started = None

    def _run(self, interval: float, is_over: threading.Event) -> None:
        self._started = process_start(os.getpid())
        try:
            remove_stale()
            while not is_over.is_set():
                began = time.perf_counter()
                with self._busy:
                    if not is_over.is_set():
                        self.publish()
                is_over.wait(max(interval, SLEEPS * (time.perf_counter() - began)))
        except OSError as error:
            logger.info("cannot publish this process: %s", error)


def interval_s() -> float:
    """The interval that PAGED_KV_PUBLISH sets, in seconds.

    Raises:
        ValueError: it is no number of seconds.
    """
    text = os.environ.get("PAGED_KV_PUBLISH", "")
    try:
        seconds = float(text or INTERVAL_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"PAGED_KV_PUBLISH must be the seconds between two looks at the pools, or 0 for none, "
            f"got {text!r}"
        )
    return seconds


publisher = Publisher(lambda: view_process(open_pools.items()))
