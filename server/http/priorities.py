"""The priorities that clients may give their requests."""

from __future__ import annotations

import re
from typing import NamedTuple


class PriorityRange(NamedTuple):
    """The priorities that a client may give its requests; lower ones begin sooner."""

    least: int
    most: int


def priorities(text: str) -> PriorityRange:
    """A range such as `-10:100`, from the command line or a file of keys.

    Raises:
        ValueError: the text is none.
    """
    if found := re.fullmatch(r"(-?[0-9]{1,9}):(-?[0-9]{1,9})", text):
        least, most = int(found[1]), int(found[2])
        if least <= 0 <= most:
            return PriorityRange(least, most)
    raise ValueError(f"LOW:HIGH is needed, with 0 within, got {text!r}")
