"""What has happened in a pool, counted as it happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paged_kv.allocator.events import Events


@dataclass
class PoolCounts:
    """See `PoolStats`, which has the same names.

    Attributes:
        events: is told what only the pool knows.
    """

    events: Events
    evictions: Counter[str] = field(default_factory=Counter)
    requantisations: Counter[str] = field(default_factory=Counter)
    prefix_queries: int = 0
    prefix_hits: int = 0

    def look_up(self, num_tokens: int, found: int) -> None:
        """Count a prompt that was looked up, and how much of it was found."""
        self.prefix_queries += num_tokens
        self.prefix_hits += found
        self.events.looked_up(num_tokens, found)

    def frozen(self) -> dict[str, Any]:
        """The counts of now, by their names."""
        counts = {name: value for name, value in vars(self).items() if name != "events"}
        return {
            **counts,
            "evictions": dict(self.evictions),
            "requantisations": dict(self.requantisations),
        }
