"""Reads lists and arrays of one integer per sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx


def integers(numbers: Iterable[int] | mx.array) -> list[int]:
    """The numbers as a list."""
    listed: Any = numbers.tolist() if isinstance(numbers, mx.array) else numbers
    return list(listed)


def trim_counts(n: Iterable[int] | mx.array, batch: int) -> list[int]:
    """The numbers of tokens to trim from each of `batch` sequences.

    Raises:
        ValueError: there are not `batch` counts, or one is negative.
    """
    counts = integers(n)
    if len(counts) != batch:
        raise ValueError(f"trim needs one count per sequence ({batch}), got {len(counts)}")
    if min(counts, default=0) < 0:
        raise ValueError(f"trim needs counts of tokens that are not negative, got {min(counts)}")
    return counts
