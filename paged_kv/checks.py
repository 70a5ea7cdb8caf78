"""Checks arguments before the library uses them; parses and formats sizes in bytes as people write
them, such as 512MB or 1.5GiB.

Each error names the argument, what it got and what it takes. A value of the wrong type raises
TypeError, a value out of range ValueError.
"""

from __future__ import annotations

import math
import operator
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Hashable, Sequence
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol


class Array(Protocol):
    """An array of numbers, of any library."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> object: ...


TokenIds = Sequence[int] | Array

# The store holds token ids as signed 64-bit numbers. Image tokens have negative ids.
_LEAST_TOKEN, _MOST_TOKEN = -(1 << 63), (1 << 63) - 1


def whole_number(name: str, value: object, *, least: int) -> int:
    """An integer, of Python or numpy, that is at least `least`.

    Raises:
        TypeError: the value is not an integer; True and False are not.
        ValueError: it is less than `least`.
    """
    number = _as_integer(value)
    if number is None:
        raise TypeError(f"{name} must be an integer from {least} on, got {described(value)}")
    if number < least:
        raise ValueError(f"{name} must be an integer from {least} on, got {described(number)}")
    return number


def token_ids(tokens: object, name: str = "tokens") -> list[int]:
    """Token ids from a sequence of integers, or from a one-dimensional array (of MLX, numpy, ...).
    O(tokens).

    Raises:
        TypeError: the value is neither; encode text with a tokenizer first.
        ValueError: an id is not a signed 64-bit number, or the array is not one-dimensional.
    """
    ids = _listed(tokens, name)
    if not set(map(type, ids)) <= {int}:
        ids = [_token_id(token, at, name) for at, token in enumerate(ids)]
    if ids and (min(ids) < _LEAST_TOKEN or max(ids) > _MOST_TOKEN):
        at = next(at for at, each in enumerate(ids) if not _LEAST_TOKEN <= each <= _MOST_TOKEN)
        raise ValueError(
            f"{name} must be signed 64-bit token ids, got {described(ids[at])} at position {at}"
        )
    return ids


def file_path(name: str, value: object) -> Path:
    """The path that a string or a path object names; "~" is the user's home.

    Raises:
        TypeError: the value is neither.
        ValueError: it is empty, or not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {described(value)}")
    path = os.fsdecode(value)
    if not path or "\0" in path:
        raise ValueError(f"{name} must be a path, got {path!r}: leave it out for none")
    return Path(path).expanduser()


def cache_folder() -> Path:
    """The folder for what can be made again: paged-kv in $XDG_CACHE_HOME, or in ~/.cache. Its "~"
    stays where nobody knows the user's home."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "paged-kv"


def require_hashable(name: str, value: Hashable) -> None:
    """Raises TypeError unless the value is hashable."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{name} must be hashable, such as a text or a tuple of texts, got {described(value)}"
        ) from None


def described(value: object) -> str:
    """A value as errors show it: a short value in full, any other by its type."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple) and not value:
        return f"an empty {type(value).__name__}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a value of type {type(value).__name__}"


def _listed(tokens: Any, name: str) -> list[Any]:
    if hasattr(tokens, "ndim") and hasattr(tokens, "tolist"):
        if tokens.ndim != 1:
            raise ValueError(
                f"{name} must have one dimension, got an array of shape {tuple(tokens.shape)}: "
                "give the prompts one by one"
            )
        return list(tokens.tolist())
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray):
        text = isinstance(tokens, str)
        advice = ": tokenizer.encode(text) gives its token ids" if text else ""
        raise TypeError(f"{name} must be a list of token ids, got {described(tokens)}{advice}")
    return list(tokens)


def _token_id(token: object, at: int, name: str) -> int:
    number = _as_integer(token)
    if number is None:
        raise TypeError(f"{name} must be integers, got {described(token)} at position {at}")
    return number


def _as_integer(value: Any) -> int | None:
    """The value as a Python int; None if it is not an integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


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
