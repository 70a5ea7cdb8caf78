"""The options of a store, beside its place and its size."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paged_kv.checks import file_path, whole_number
from paged_kv.sizes import size_in_bytes
from paged_kv.store.sights import WriteRule


@dataclass(frozen=True)
class StoreOptions:
    """How a factory uses its store.

    Attributes:
        after: write a prefix once so many prompts have begun with it. With 2, what comes only once
            does not wear the disk. Counts outlive the process.
        at_once: write a prefix of at least so many tokens when it is first inserted. None means no
            such length.
        daily_bytes: the most to write to the folder in a day (UTC), by all processes that share it,
            in bytes or as a text such as "20GB". Then it is only read. None means no limit.
        secret: a file with at least 32 bytes that only the machines that share a server know.
            Entries on servers are verified with it. A server needs one.
        unauthenticated: take servers without a secret: whoever can write there can change answers.

    Raises:
        TypeError, ValueError: an option is of the wrong type or out of its range; the message says
            which.
    """

    after: int = 1
    at_once: int | None = None
    daily_bytes: float | str | None = None
    secret: str | os.PathLike[str] | None = None
    unauthenticated: bool = False

    def __post_init__(self) -> None:
        whole_number("after", self.after, least=1)
        if self.at_once is not None:
            whole_number("at_once", self.at_once, least=1)
        if self.daily_bytes is not None:
            size_in_bytes("daily_bytes", self.daily_bytes)
        if self.secret is not None:
            file_path("secret", self.secret)

    @property
    def rule(self) -> WriteRule:
        """Which prefixes to write."""
        return WriteRule(self.after, self.at_once)

    @property
    def most_bytes_a_day(self) -> int | None:
        """The daily budget in bytes."""
        return None if self.daily_bytes is None else size_in_bytes("daily_bytes", self.daily_bytes)


WRITE_EVERYTHING = StoreOptions()
