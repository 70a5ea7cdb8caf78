"""Decides which prefixes to store: those that prompts begin with again.

Most prompts come once, and what is written for them only wears the disk. So each block of a prompt
is counted when it is looked up, and written once it was seen often enough. A block that nobody has
looked up yet, such as that of an answer, was seen once when it is first cached.

Counts are kept for the latest blocks, and of these the latest over restarts too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

# 16 million tokens of prompts, in about 8 MB of memory.
MOST_COUNTED = 1 << 16
# Of these so many outlive the process, in a file of 128 kB.
MOST_SAVED = 1 << 14
SAVED_BYTES = 8 * MOST_SAVED


@dataclass(frozen=True)
class WriteRule:
    """When a prefix is written.

    Attributes:
        after: once so many prompts have begun with it.
        at_once: at its first look-up if it has at least so many tokens; None for no such number. No
            number is worth its bytes in all of the replayed loads of benches/store_writes.py.
    """

    after: int = 1
    at_once: int | None = None

    def is_due(self, lookups: int, num_tokens: int) -> bool:
        """Whether to write blocks of a prefix of `num_tokens` tokens, looked up so often."""
        is_long = self.at_once is not None and num_tokens >= self.at_once
        return is_long or lookups >= self.after


WRITE_ALL = WriteRule()


class LookupCounts:
    """How often blocks were looked up, by their digests. One thread uses it at a time.

    Args:
        saved: what `unsaved` returned in earlier processes, joined.
    """

    def __init__(self, saved: bytes = b"") -> None:
        self._counts: OrderedDict[int, int] = OrderedDict()
        self._unsaved: list[int] = []
        for block in _words(saved):
            self._count(block)

    def __getitem__(self, digest: str) -> int:
        """How often a block was looked up."""
        return self._counts.get(_word(digest), 0)

    def record(self, digest: str) -> None:
        """Count a block."""
        self._count(_word(digest))
        self._unsaved.append(_word(digest))
        del self._unsaved[:-MOST_SAVED]

    @property
    def num_unsaved(self) -> int:
        """How many look-ups `unsaved` would return."""
        return len(self._unsaved)

    def unsaved(self) -> bytes:
        """The look-ups since the last call, to append to the saved ones."""
        words, self._unsaved = array("Q", self._unsaved), []
        return words.tobytes()

    def _count(self, block: int) -> None:
        self._counts[block] = self._counts.pop(block, 0) + 1
        if len(self._counts) > MOST_COUNTED:
            self._counts.popitem(last=False)


def _word(digest: str) -> int:
    """64 bits tell blocks apart: two that are taken for one are written early."""
    return int(digest[:16], 16)


def _words(saved: bytes) -> array[int]:
    words = array("Q")
    words.frombytes(saved[: len(saved) // 8 * 8][-SAVED_BYTES:])
    return words
