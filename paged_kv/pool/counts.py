"""Counts evictions, requantisations, prefix look-ups and drafts of a pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paged_kv.allocator.events import Events


@dataclass
class PoolCounts:
    """See `PoolStats`, which has the same names.

    Attributes:
        events: notified of look-ups, which the allocators do not know.
    """

    events: Events
    evictions: Counter[str] = field(default_factory=Counter)
    requantisations: Counter[str] = field(default_factory=Counter)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    tokens_recomputed: int = 0
    tokens_read: int = 0
    tokens_reread: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def look_up(self, num_tokens: int, found: int) -> None:
        """Count the look-up of a prompt of `num_tokens` tokens, of which `found` were cached."""
        self.prefix_queries += num_tokens
        self.prefix_hits += found
        self.events.looked_up(num_tokens, found)

    def note_draft(self, drafted: int, accepted: int) -> None:
        """Count a step of one sequence; one without drafted tokens does not count."""
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def frozen(self) -> dict[str, Any]:
        """A copy of the counts, by name."""
        counts = {name: value for name, value in vars(self).items() if name != "events"}
        return {
            **counts,
            "evictions": dict(self.evictions),
            "requantisations": dict(self.requantisations),
        }
