"""Counts what tiers did for this process, and what went wrong."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

logger = logging.getLogger("paged_kv")


@dataclass(frozen=True)
class StoreStats:
    """Counts of what a store did for this process.

    Attributes:
        tokens_found: tokens of prefix hits that came from the store; a `TieredStore` counts them.
        entries_read: entries whose content was used.
        bytes_read: of their arrays.
        entries_written: entries that were stored.
        bytes_written: of their arrays.
        bytes_today: bytes that were written since midnight, UTC: to a folder by all processes, to a
            server by this one.
        bytes_in_all: bytes that were written since the store was made, or to a server since this
            process began.
        dropped: entries that were not stored, by reason.
        errors: failures, by kind.
    """

    tokens_found: int
    entries_read: int
    bytes_read: int
    entries_written: int
    bytes_written: int
    bytes_today: int
    bytes_in_all: int
    dropped: Mapping[str, int]
    errors: Mapping[str, int]

    def __add__(self, other: StoreStats) -> StoreStats:
        """The sum of two tiers."""
        counts = {
            name: value + getattr(other, name)
            for name, value in vars(self).items()
            if isinstance(value, int)
        }
        return replace(
            self,
            **counts,
            dropped=Counter(self.dropped) + Counter(other.dropped),
            errors=Counter(self.errors) + Counter(other.errors),
        )


class Faults:
    """Counts faults and dropped entries of a tier, and warns of each kind once."""

    def __init__(self, name: str) -> None:
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._name = name
        self._lock = threading.Lock()

    def note(self, error: BaseException) -> None:
        """Count an error of the tier, or of its content."""
        kind = getattr(error, "kind", type(error).__name__)
        self._count(self.errors, kind, f"{kind}: {error}", 1)

    def drop(self, reason: str, count: int = 1, details: str = "") -> None:
        """Count entries that were not stored. The details are for the log alone."""
        message = f"pages were not stored: {reason}" + (f": {details}" if details else "")
        self._count(self.dropped, reason, message, count)

    def _count(self, counter: Counter[str], kind: str, message: str, count: int) -> None:
        with self._lock:
            is_first = not counter[kind]
            counter[kind] += count
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "page store %s: %s (warned once; stats() counts)", self._name, message)
