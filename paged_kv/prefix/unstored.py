"""Marks prompts that no store may keep."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Unstored:
    """A salt for prompts that are cached in memory only, and never written to a store. They share
    what is cached with all other prompts of the inner salt.

    Attributes:
        salt: the inner salt.
    """

    salt: Hashable = None


def inner_salt(salt: Hashable) -> Hashable:
    """The salt that separates prompts, without the mark."""
    return salt.salt if isinstance(salt, Unstored) else salt


def may_store(salt: Hashable) -> bool:
    """Whether prompts of this salt may be written to a store."""
    return not isinstance(salt, Unstored)
