"""Counts the faults of a disk and logs each kind once."""

import logging
import threading
from collections import Counter

logger = logging.getLogger("paged_kv")


class Faults:
    """Counts faults and dropped entries, and warns of each kind once."""

    def __init__(self, name: str) -> None:
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._name = name
        self._lock = threading.Lock()

    def note(self, error: BaseException) -> None:
        """Count an error of the disk, or of its content."""
        kind = getattr(error, "kind", type(error).__name__)
        self._count(self.errors, kind, f"{kind}: {error}", 1)

    def drop(self, reason: str, count: int = 1) -> None:
        """Count entries that were not stored."""
        self._count(self.dropped, reason, f"pages were not stored: {reason}", count)

    def _count(self, counter: Counter[str], kind: str, message: str, count: int) -> None:
        with self._lock:
            is_first = not counter[kind]
            counter[kind] += count
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "page store %s: %s (warned once; stats() counts)", self._name, message)
