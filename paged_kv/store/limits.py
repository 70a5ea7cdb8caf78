"""How much a folder may take and write: the cap, and the bytes written today and in all, over
restarts and by all processes that share it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from paged_kv.sizes import format_size
from paged_kv.store.folder import Folder

LEDGER = "written.json"
_SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Limits:
    """The limits of a store.

    Attributes:
        max_bytes: the most bytes on disk for everything in the folder, at any time.
        min_free_bytes: bytes that must stay free on the disk.
    """

    max_bytes: int
    min_free_bytes: int

    def excess(self, used: int, free: int, more: int) -> int:
        """The bytes by which `more` bytes would exceed a limit; negative if they fit."""
        return max(used + more - self.max_bytes, self.min_free_bytes + more - free)

    def lack(self, used: int, free: int, more: int) -> str:
        """Which limit `more` bytes exceed, and what to change, for people to read."""
        needs = f"an entry needs {format_size(more)}"
        if self.min_free_bytes - free > used - self.max_bytes:
            return (
                f"{needs}, and the disk has {format_size(free)} free, of which "
                f"{format_size(self.min_free_bytes)} stay free: free disk space, or name a folder "
                "on another disk"
            )
        return (
            f"{needs}, the folder takes {format_size(used)} of at most "
            f"{format_size(self.max_bytes)}, and what could be evicted is less: raise "
            "--store-bytes (store_bytes=)"
        )


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
