"""Shows the pools of this process to other processes of the same user.

A thread looks five times a second whether somebody has asked: see `processes`. After each question
it writes a view of the open pools to PID.json in the runtime folder, and nothing while nobody asks.
There is no port. Only for a view do pools stand still, for some microseconds while references are
copied.

PAGED_KV_PUBLISH=0 shows nothing, and starts no thread.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paged_kv.monitor.pool_views import view_process
from paged_kv.monitor.process_view import ProcessView
from paged_kv.monitor.processes import (
    is_later,
    last_question,
    make_runtime_folder,
    remove_ended,
    runtime_folder,
)
from paged_kv.pool.page_pool import open_pools

logger = logging.getLogger("paged_kv")

# `paged-kv stats` waits about half as long for an answer.
LOOK_S = 0.2


class Publisher:
    """Writes what `view` returns whenever somebody asks, from a thread that `start` starts.

    A process that is forked from this one shows nothing until `start` is called there.
    """

    def __init__(self, view: Callable[[], ProcessView]) -> None:
        self._view = view
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._is_over = False
        atexit.register(self.stop)

    def start(self) -> None:
        """Answer from now on, until the process ends.

        Raises:
            ValueError: PAGED_KV_PUBLISH is no number from 0 on.
        """
        if is_wanted() and not self._runs:
            self._thread = threading.Thread(target=self._run, name="paged-kv", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Answer no longer, and remove the file."""
        self._is_over = True
        if self._runs and self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def _runs(self) -> bool:
        # A forked process has this object, and not its thread.
        return self._thread is not None and self._thread.is_alive()

    def publish(self, path: Path) -> None:
        """Write the present view to a file.

        Raises:
            OSError: it cannot be written.
        """
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self._view().as_dict()))
        part.replace(path)

    def _run(self) -> None:
        try:
            folder = runtime_folder()
            make_runtime_folder(folder)
            remove_ended(folder)
            self._path = folder / f"{os.getpid()}.json"
            self._path.unlink(missing_ok=True)  # of an earlier process with this number
        except OSError as error:
            logger.info("cannot show the pools of this process: %s", error)
            return
        while not self._is_over:
            with suppress(OSError):  # the disk may be full, or the folder gone, for a while
                self._answer(self._path)
            time.sleep(LOOK_S)
        self._path.unlink(missing_ok=True)

    def _answer(self, path: Path) -> None:
        """Answer the last question unless that was done. The file is there from the start, empty,
        so that whoever asks knows whom to wait for."""
        if not path.exists():
            make_runtime_folder(path.parent)
            path.touch()
        if not is_later(path.stat(), last_question(path.parent)):
            self.publish(path)


def is_wanted() -> bool:
    """Whether PAGED_KV_PUBLISH lets others see this process: any number but 0 does, as it once was
    a number of seconds.

    Raises:
        ValueError: it is no number from 0 on.
    """
    text = os.environ.get("PAGED_KV_PUBLISH") or "1"
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(
            "PAGED_KV_PUBLISH must be 0, so that `paged-kv stats` does not see this process, or 1, "
            f"got {text!r}"
        )
    return number > 0


publisher = Publisher(lambda: view_process(open_pools.items()))
