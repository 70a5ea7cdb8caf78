"""Sizes in bytes as people write them: 512MB, 1.5GiB."""

import re
from argparse import ArgumentTypeError
from decimal import Decimal

# As mlx-lm reads its own options: MB and GB are powers of ten. MiB and GiB are powers of two.
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes, from plain digits or a number with a unit: 512MB, 4G, 1.5GiB; case does not matter.

    Raises:
        argparse.ArgumentTypeError: it is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ArgumentTypeError(f"{text!r} is not a size; write one like 512MB, 4GB or 1.5GiB")
    base = 1024 if match[3] else 1000
    nbytes = int(Decimal(match[1]) * base ** _PREFIXES[match[2].lower()])
    if nbytes < 1:
        raise ArgumentTypeError(f"{text!r} is less than one byte; write a size like 512MB or 4GB")
    return nbytes


def size_in_bytes(size: int | str) -> int:
    """Bytes, from a number of them or a text as `parse_size` reads it.

    Raises:
        ValueError: it is not a size.
    """
    try:
        return parse_size(size) if isinstance(size, str) else size
    except ArgumentTypeError as error:
        raise ValueError(str(error)) from None


def format_size(nbytes: int) -> str:
    """A size to be read by people, in powers of ten: 8.59 GB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.2f} {unit}"
    return f"{nbytes} B"
