"""Counts drafted and accepted tokens, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SpeculationCounts:
    """Counts of one row, or of all rows together.

    Attributes:
        drafts: steps in which tokens were drafted; vLLM's `num_drafts`.
        draft_tokens: drafted tokens; vLLM's `num_draft_tokens`.
        accepted_tokens: drafted tokens that the model accepted; vLLM's `num_accepted_tokens`.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def note(self, drafted: int, accepted: int) -> None:
        """Count a step of one row; one without a draft does not count."""
        if drafted:
            self.drafts += 1
            self.draft_tokens += drafted
            self.accepted_tokens += accepted
