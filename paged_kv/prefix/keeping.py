"""What the tiers below memory may keep of a prompt. Its salt says so, as every part of the package
that handles prompts passes the salt on."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum


class Keeping(Enum):
    """What is written of a prompt.

    NOTHING: it stays in memory.
    AS_RULED: what `StoreOptions` say.
    AT_ONCE: everything, as soon as it is inserted, to servers only: another machine waits for it.
    KNOWN: nothing more than before: the prompt was looked up already, and does not count again.
    """

    NOTHING = "nothing"
    AS_RULED = "as ruled"
    AT_ONCE = "at once"
    KNOWN = "known"


@dataclass(frozen=True)
class Unstored:
    """A salt for prompts that are cached in memory only, and never written to a store. They share
    what is cached with all other prompts of the inner salt.

    Attributes:
        salt: the inner salt.
    """

    salt: Hashable = None


@dataclass(frozen=True)
class Published:
    """A salt for prompts that another machine waits for.

    Attributes:
        salt: the inner salt.
    """

    salt: Hashable = None


@dataclass(frozen=True)
class LookedUp:
    """A salt for the second look-up of a prompt, such as that of a sequence that gave its pages up.

    Attributes:
        salt: the salt of the first one.
    """

    salt: Hashable = None


def inner_salt(salt: Hashable) -> Hashable:
    """The salt that separates prompts, without the marks."""
    return inner_salt(salt.salt) if isinstance(salt, Unstored | Published | LookedUp) else salt


def keeping_of(salt: Hashable) -> Keeping:
    """What may be kept of prompts of this salt."""
    match salt:
        case Unstored():
            return Keeping.NOTHING
        case Published():
            return Keeping.AT_ONCE
        case LookedUp():
            return Keeping.KNOWN
    return Keeping.AS_RULED
