"""Counts the bytes that are written to a folder, today and in all, over restarts and by all
processes that share it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from paged_kv.store.folder import Folder

LEDGER = "written.json"
_SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Written:
    """Bytes written to a folder.

    Attributes:
        day: the day that `today` counts, as days since 1970 in UTC.
        today: bytes of that day.
        in_all: bytes since the folder was made.
    """

    day: int = 0
    today: int = 0
    in_all: int = 0

    @property
    def bytes_today(self) -> int:
        """Bytes since midnight, UTC."""
        return self.today if self.day == today() else 0

    def plus(self, nbytes: int) -> Written:
        """The counts after `nbytes` more."""
        return Written(today(), self.bytes_today + nbytes, self.in_all + nbytes)


def today() -> int:
    """The number of the present day, which begins at midnight, UTC."""
    return int(time.time() // _SECONDS_A_DAY)


def read_written(folder: Folder) -> Written:
    """The counts of a folder; zeros if the file is lost or damaged.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(folder.read(LEDGER, 1000))
        return Written(int(content["day"]), int(content["today"]), int(content["in_all"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Written()


def write_written(folder: Folder, written: Written) -> None:
    """Note the counts of a folder.

    Raises:
        OSError: the file cannot be written.
    """
    counts = {"day": written.day, "today": written.today, "in_all": written.in_all}
    folder.write(LEDGER, [json.dumps(counts).encode()])
