"""The options of a store, and how command lines name its places and its size."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paged_kv.checks import file_path, whole_number
from paged_kv.commands.arguments import path, positive
from paged_kv.options import Options, option
from paged_kv.sizes import parse_size, size_in_bytes
from paged_kv.store.lookup_counts import WriteRule


def store_size(text: str) -> int:
    """The bytes that a page store may take."""
    from paged_kv.store.folder_store import MIN_BYTES

    nbytes = parse_size(text)
    if nbytes < MIN_BYTES:
        raise ArgumentTypeError(
            f"{text!r} is too small: the index alone takes some of it, so give at least "
            f"{MIN_BYTES:,} bytes"
        )
    return nbytes


def tier(text: str) -> str | Path:
    """A folder, or the address of a server."""
    from paged_kv.tiers.address import parse_address

    if "://" not in text:
        return path(text)
    try:
        parse_address(text)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True)
class StoreOptions(Options):
    """How a factory uses its store: what it writes, and what it trusts.

    Attributes:
        after: write a prefix to the store once N prompts have begun with it: with 2, what comes
            only once does not wear the disk. Counts outlive the process.
        at_once: write a prefix of at least so many tokens when it is first seen.
        daily_bytes: the most to write to the folder in a day (UTC), such as 20GB, by all processes
            that share it; then it is only read.
        secret: a file of at least 32 bytes, the same on all machines, with which entries on servers
            are verified.
        unauthenticated: take servers without a secret: whoever can write there can change answers.
    """

    after: int = option(
        1, parse=positive, check=partial(whole_number, "after", least=1), needs="store", metavar="N"
    )
    at_once: int | None = option(
        None,
        parse=positive,
        check=partial(whole_number, "at_once", least=1),
        needs="store",
        usual="no such length",
        metavar="TOKENS",
    )
    daily_bytes: float | str | None = option(
        None,
        parse=parse_size,
        check=partial(size_in_bytes, "daily_bytes"),
        needs="store",
        usual="no limit",
        metavar="SIZE",
    )
    secret: str | os.PathLike[str] | None = option(
        None, parse=path, check=partial(file_path, "secret"), needs="store", metavar="FILE"
    )
    unauthenticated: bool = option(False, needs="store")

    @property
    def rule(self) -> WriteRule:
        """Which prefixes to write."""
        return WriteRule(self.after, self.at_once)

    @property
    def most_bytes_a_day(self) -> int | None:
        """The daily budget in bytes."""
        return None if self.daily_bytes is None else int(self.daily_bytes)


WRITE_EVERYTHING = StoreOptions()
