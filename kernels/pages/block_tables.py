"""Finds the pages that sequences of a batch share, so that kernels read them once for all of these.

Sequences whose tables begin with the same blocks form a tree: a system prompt, then tools, then a
conversation that forked into samples. It is written as suffix arrays are: the sequences in an order
in which those of every branch follow each other, and for each the number of pages that it shares
with the one before it. The fewest in shared[i + 1 : j + 1] is what sequences i and j of this order
share.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from operator import is_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = tuple[int, ...]


class SharedPages(NamedTuple):
    """Which sequences (rows) of a batch have pages in common.

    Attributes:
        order: int32 [B], the rows in the order of the tree.
        shared: int32 [B], the number of first pages that row order[i] shares with row order[i - 1];
            0 for the first.
    """

    order: npt.NDArray[np.int32]
    shared: npt.NDArray[np.int32]


class BlockTables(tuple[Table, ...]):
    """The block tables of a batch, and what is derived from them.

    Both arrays are made for the first caller, and `after` hands them on from step to step.
    """

    _before: BlockTables | None = None

    def after(self, tables: Iterable[Table]) -> BlockTables:
        """The tables of the next step: this object if they are the same objects, else a new one,
        which converts only the tables that are new. O(B), about 1 microsecond for 64 rows."""
        new = BlockTables(tables)
        if len(new) != len(self):
            return new
        if all(map(is_, new, self)):
            return self
        if "array" in self.__dict__:
            new._before = self
        return new

    @cached_property
    def array(self) -> npt.NDArray[np.int32]:
        """int32 [B, entries of the longest]. Any valid entry fills up the shorter tables. Do not
        change it."""
        before, self._before = self._before, None
        shape = len(self), max(map(len, self), default=0)
        # Another filler: the one before may be a block that there is no more.
        if before is not None and before.array.shape == shape and before._filler == self._filler:
            array = before.array.copy()
            changed = [row for row, table in enumerate(self) if table is not before[row]]
        else:
            array = np.empty(shape, np.int32)
            changed = list(range(len(self)))
        for row in changed:
            table = self[row]
            array[row, : len(table)] = table
            array[row, len(table) :] = self._filler
        return array

    @cached_property
    def _filler(self) -> int:
        """The entry that fills up the shorter tables."""
        longest = max(self, key=len, default=())
        return longest[0] if longest else 0

    @cached_property
    def shared_pages(self) -> SharedPages | None:
        """Which rows share pages; None if none do. Below 20 microseconds for 64 rows, after the
        array."""
        with_blocks = [table[0] for table in self if table]
        if len(set(with_blocks)) == len(with_blocks):
            return None
        array, count = self.array, len(self)
        width, lengths = array.shape[1], np.fromiter(map(len, self), np.int32, count)
        if lengths.min() < width:
            array = np.where(np.arange(width) < lengths[:, None], array, np.int32(-1))
        # Rows in the order of their bytes: equal beginnings follow each other.
        order = np.argsort(array.view(f"V{width * array.itemsize}").ravel())
        ordered, lengths = array[order], lengths[order]
        equal = ordered[1:] == ordered[:-1]
        shared = np.zeros(count, np.int32)
        # Where no entry differs, `argmin` finds nothing: both tables are the same.
        shared[1:] = np.where(equal.all(axis=1), lengths[1:], equal.argmin(axis=1))
        return SharedPages(order.astype(np.int32), shared)
