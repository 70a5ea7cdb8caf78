"""The tiers below memory: what they may keep of a prompt, and whether reading it back is quicker
than computing it.

A prompt's salt says what they may keep, as every part of the package that handles prompts passes
the salt on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Protocol

from paged_kv.allocator.prefixes.prefix_node import Node

Nodes = Sequence[Node]
Tokens = Sequence[int]

# A share of an earlier measurement that a new one leaves, so that old ones fade.
_FADING = 0.8


class StorePolicy(Enum):
    """What is written of a prompt.

    NEVER: it stays in memory.
    DEFAULT: what `StoreOptions` say.
    NOW: everything, as soon as it is inserted, to servers only: another machine waits for it.
    KNOWN: nothing more than before: the prompt was looked up already, and does not count again.
    """

    NEVER = "never"
    DEFAULT = "default"
    NOW = "now"
    KNOWN = "known"


@dataclass(frozen=True)
class MarkedSalt:
    """A salt that says what may be kept of a prompt, which shares what is cached with all other
    prompts of the salt in it. That one may be marked too."""

    policy: ClassVar[StorePolicy]
    salt: Hashable = None


class Unstored(MarkedSalt):
    """A salt for prompts that are cached in memory only, and never written to a store."""

    policy = StorePolicy.NEVER


class Published(MarkedSalt):
    """A salt for prompts that another machine waits for."""

    policy = StorePolicy.NOW


class LookedUp(MarkedSalt):
    """A salt for the second look-up of a prompt, as of a sequence that gave its pages up."""

    policy = StorePolicy.KNOWN


def inner_salt(salt: Hashable) -> Hashable:
    """The salt that separates prompts, without the marks."""
    return inner_salt(salt.salt) if isinstance(salt, MarkedSalt) else salt


def store_policy_of(salt: Hashable) -> StorePolicy:
    """What may be kept of prompts of this salt."""
    return salt.policy if isinstance(salt, MarkedSalt) else StorePolicy.DEFAULT


class LowerTier(Protocol):
    """Keeps the index's prefixes outside memory and loads them back. No method raises because of a
    disk."""

    def load(self, namespace: Hashable, tokens: Tokens, policy: StorePolicy) -> None:
        """Load a prompt's kept blocks into the index if they lengthen its prefix hit. Loading may
        evict other prefixes. Unless nothing may be kept, this counts that the prompt was seen."""
        ...

    def keep(self, namespace: Hashable, nodes: Nodes, num_tokens: int, policy: StorePolicy) -> None:
        """Record that the index holds these nodes, a path from a root's child down, and that the
        first `num_tokens` tokens in them may be kept."""
        ...


@dataclass
class Rate:
    """How long a token takes, from measurements of which later ones count more."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    def record(self, tokens: int, seconds: float) -> None:
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
    reading: defaultdict[str, Rate] = field(default_factory=lambda: defaultdict(Rate))

    def is_reading_quicker(self, tokens: int, tier: str) -> bool:
        """Whether to read so many tokens from a tier instead of computing them. What was not
        measured yet is read: that measures it."""
        computing = self.computing.seconds_for(tokens)
        reading = self.reading[tier].seconds_for(tokens)
        if computing is None or reading is None or reading <= computing:
            return True
        self.reading[tier].forgive()
        return False
