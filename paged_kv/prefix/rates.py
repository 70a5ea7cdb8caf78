"""Estimates whether reading a prefix from a lower tier is quicker than computing it."""

from __future__ import annotations

from dataclasses import dataclass, field

# A share of an earlier measurement that a new one leaves, so that old ones fade.
_FADING = 0.8


@dataclass
class Rate:
    """How long a token takes, from measurements of which later ones count more."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take in a measurement."""
        self._tokens = _FADING * self._tokens + tokens
        self._seconds = _FADING * self._seconds + seconds

    def seconds_for(self, tokens: int) -> float | None:
        """How long so many tokens will take; None before the first measurement."""
        return tokens * self._seconds / self._tokens if self._tokens else None

    def forgive(self) -> None:
        """Believe in a shorter time than was measured, so that it is measured again some day."""
        self._seconds *= _FADING


@dataclass
class Rates:
    """The rates at which this process computes tokens of prompts, takes steps that compute few or
    none of them, and reads tokens from each tier."""

    computing: Rate = field(default_factory=Rate)
    decoding: Rate = field(default_factory=Rate)
    _reading: dict[str, Rate] = field(default_factory=dict)

    def reading(self, tier: str) -> Rate:
        """The rate of a tier."""
        return self._reading.setdefault(tier, Rate())

    def is_reading_quicker(self, tokens: int, tier: str) -> bool:
        """Whether to read so many tokens from a tier instead of computing them. What was not
        measured yet is read: that measures it."""
        computing = self.computing.seconds_for(tokens)
        reading = self.reading(tier).seconds_for(tokens)
        if computing is None or reading is None or reading <= computing:
            return True
        self.reading(tier).forgive()
        return False
