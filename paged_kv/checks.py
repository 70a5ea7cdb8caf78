"""Checks arguments before the library uses them.

Each error names the argument, what it got and what it takes. A value of the wrong type raises
TypeError, a value out of range ValueError.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Hashable, Sequence
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
