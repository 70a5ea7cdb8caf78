"""Parses and formats sizes in bytes as people write them: 512MB, 1.5GiB; and numbers of things."""

import math
import re
from argparse import ArgumentTypeError
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from paged_kv.checks import described

# MB and GB are powers of ten, as in mlx-lm's options. MiB and GiB are powers of two.
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)
# Systems count bytes of files and memory in signed 64-bit numbers.
MOST_BYTES = (1 << 63) - 1


def parse_size(text: str) -> int:
    """Bytes, from plain digits or a number with a unit: 512MB, 4G, 1.5GiB; case does not matter.

    Raises:
        argparse.ArgumentTypeError: the text is not a size, less than one byte, or too large.
    """
    try:
        return _in_range(_parsed(text), text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def size_in_bytes(name: str, size: object) -> int:
    """Bytes, from a number, which is rounded down, or from a text that `parse_size` reads. Errors
    call the argument `name`.

    Raises:
        TypeError: `size` is neither.
        ValueError: it is not a size, less than one byte, or too large.
    """
    if isinstance(size, bool) or not isinstance(size, str | Real):
        raise TypeError(
            f"{name} must be a number of bytes or a text such as '4GB', got {described(size)}"
        )
    try:
        return _in_range(_parsed(size) if isinstance(size, str) else _whole(size), size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def format_size(nbytes: int) -> str:
    """A size for people to read, in powers of ten: 8.59 GB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.2f} {unit}"
    return f"{nbytes} B"


def counted(count: int, noun: str) -> str:
    """A number of things: 1 block, 2,048 blocks."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def _parsed(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{described(text)} is not a size; write one like 512MB, 4GB or 1.5GiB")
    base = 1024 if match[3] else 1000
    return int(Decimal(match[1]) * base ** _PREFIXES[match[2].lower()])


def _whole(number: Any) -> int:
    """The integer part of a real number, of Python or numpy."""
    if not isinstance(number, Integral) and not math.isfinite(number):
        raise ValueError(f"{described(number)} is not a size; give a number of bytes")
    return int(number)


def _in_range(nbytes: int, size: object) -> int:
    if nbytes < 1:
        raise ValueError(f"{described(size)} is less than one byte; write a size like 512MB or 4GB")
    if nbytes > MOST_BYTES:
        raise ValueError(
            f"{described(size)} is more than a 64-bit number of bytes; write a size like 4GB"
        )
    return nbytes
