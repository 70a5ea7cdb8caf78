"""Makes the array that describes a batch to code whose numbers are arrays: to the GPU kernels, and
to recorded steps.

An entry of a table is slab * slab_stride + page, as everywhere, but numbers only the slabs that
occur.

Pages that sequences share are divided into groups, which a GPU kernel reads once each. Sequences
with equal first pages form a tree (`SharedPages`). A group is a piece of one of its branches: some
pages, and up to 16 sequences whose tables all have them at that place. What attention to a group's
pages gives for one of its sequences has a place among partial results, and the places of a sequence
follow each other. The sequence's own pages begin where its groups end.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, SharedPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE

ROW_FIELDS = 7
# The width of tables is a multiple of this, so that few different widths occur.
TABLE_WIDTH = 16
# The reach of tables is a multiple of this, and of an eighth of itself: so few different reaches
# occur, and all that is planned for one lasts for many steps.
LEAST_REACH = 1024

# Sequences of a group. With 4 query heads to a KV head they are the 64 query rows of a threadgroup.
SEQUENCES = 16
GROUP_FIELDS = 2 + 2 * SEQUENCES

# Pages of a group, for each of which every KV head has a threadgroup. Of 16 sequences with 4 query
# heads of 128 the results are 64 * 130 * 4 bytes, 6 % of the 512 KiB of keys and values that 4
# pages have in 16 bits. Of latents with 16 heads they are 0.5 MB, 3 % of 15 reads of 4 pages.
GROUP_PAGES = 4

# Reading in groups takes one launch more, and a second for contexts of one part: about 10
# microseconds. A page of 8 KV heads of 128 is 1 MiB, 2.6 microseconds on an M3 Max. So groups must
# save at least so many reads of pages. A page of latents of 512 with their position keys is 288
# KiB: 16 reads are 12 microseconds, which about pay for the launches.
LEAST_SAVED = 16


class PrefixGroups(NamedTuple):
    """The groups of a batch.

    Attributes:
        array: int32 [G, 2 + 2 * 16]: of each group the first of its pages and the page after the
            last, as places in the tables; then its sequences; then the places of their results. -1
            where there is none. A group without sequences has places that nobody reads.
        places: how many places there are. Both numbers are powers of two, so that few different
            ones occur.
        fields: int32 [B, 3]: of each sequence the tokens that groups read, and the first and the
            number of its places.
        saved: how many reads of pages the groups save.
    """

    array: mx.array
    places: int
    fields: npt.NDArray[np.int32]
    saved: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of groups and of places."""
        return self.array.shape[0], self.places


@dataclass(frozen=True)
class Tables:
    """A batch's block tables, whose entries number only the slabs that occur.

    Attributes:
        array: int32 [B, width]: context length, right padding, head tokens, first token after
            them, the fields of `PrefixGroups`, then the table entries.
        slabs: the numbers of the slabs that occur.
        reach: the longest context length that plans made for these tables must hold.
        own_reach: the same without the tokens that groups read.
        groups: the pages that sequences share; None if each sequence reads all of its pages.
        plans: launch plans shared by layers of one kind, by all that they depend on.
    """

    array: mx.array
    slabs: tuple[int, ...]
    reach: int
    own_reach: int
    groups: PrefixGroups | None = None
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """All of them that launches depend on, besides the contents of arrays."""
        shape = None if self.groups is None else self.groups.shape
        return self.reach, self.own_reach, self.array.shape, shape

    @property
    def arrays(self) -> list[mx.array]:
        """What changes from step to step."""
        return [self.array] if self.groups is None else [self.array, self.groups.array]

    def with_arrays(self, arrays: Iterator[mx.array]) -> "Tables":
        array = next(arrays)
        if self.groups is None:
            return replace(self, array=array)
        return replace(self, array=array, groups=self.groups._replace(array=next(arrays)))


# The key of a batch's `Tables` in its `memo`.
TABLES = "bound tables"


def tables_of(metadata: AttentionMetadata, slab_stride: int) -> Tables:
    """Made once for all layers that read the same batch."""
    if TABLES not in metadata.memo:
        reach = own_reach = _reach_of(max(metadata.context_lens, default=0))
        entries, slabs = _table_entries(metadata.block_tables, slab_stride, reach // PAGE_SIZE)
        array = entries.copy()
        array[:, 0], array[:, 1] = metadata.context_lens, metadata.right_padding
        array[:, 2], array[:, 3] = metadata.head_tokens or 0, metadata.first_tokens or 0
        is_batch = len(metadata.context_lens) > 1  # one sequence shares nothing, and is in a hurry
        groups = prefix_groups(metadata.shared_pages) if is_batch else None
        if groups is not None:
            array[:, 4:ROW_FIELDS] = groups.fields
            own_reach = _reach_of(max(0, int((array[:, 0] - array[:, 4]).max())))
        metadata.memo[TABLES] = Tables(mx.array(array), slabs, reach, own_reach, groups)
    tables: Tables = metadata.memo[TABLES]
    return tables


def _reach_of(longest: int) -> int:
    step = max(LEAST_REACH, (1 << longest.bit_length()) // 16)
    return max(1, -(-longest // step)) * step


@lru_cache(maxsize=64)
def _table_entries(
    block_tables: tuple[tuple[int, ...], ...], slab_stride: int, pages: int
) -> tuple[npt.NDArray[np.int32], tuple[int, ...]]:
    """The array of `Tables` for `pages` pages or more, without its first fields, and the slabs that
    occur. Cached, because most steps only lengthen the context: do not change the array."""
    longest = max(pages, max(map(len, block_tables), default=0))
    width = -(-(ROW_FIELDS + longest) // TABLE_WIDTH) * TABLE_WIDTH
    array = np.zeros((len(block_tables), width), np.int32)
    slabs = sorted({entry // slab_stride for table in block_tables for entry in table})
    first = {slab: (number - slab) * slab_stride for number, slab in enumerate(slabs)}
    for row, table in zip(array, block_tables, strict=True):
        bound = [entry + first[entry // slab_stride] for entry in table]
        row[ROW_FIELDS : ROW_FIELDS + len(table)] = bound
    return array, tuple(slabs)


Branch = tuple[Sequence[int], int, int]


def prefix_groups(shared: SharedPages | None) -> PrefixGroups | None:
    """The groups of a batch; None if reading in groups does not pay."""
    if shared is None:
        return None
    groups = _groups_of(shared.order.tobytes(), shared.shared.tobytes(), GROUP_PAGES)
    return groups if groups.saved >= LEAST_SAVED else None


# A tree lasts for many steps: only their own pages are added to tables.
@lru_cache(maxsize=64)
def _groups_of(order_bytes: bytes, shared_bytes: bytes, most_pages: int) -> PrefixGroups:
    order: list[int] = np.frombuffer(order_bytes, np.int32).tolist()
    shared: list[int] = np.frombuffer(shared_bytes, np.int32).tolist()
    branches = [
        (rows[at : at + SEQUENCES], first, end)
        for rows, first, end in _branches(order, shared)
        for at in range(0, len(rows), SEQUENCES)
    ]
    groups = [
        (rows, at, min(at + most_pages, end))
        for rows, first, end in branches
        for at in range(first, end, most_pages)
    ]
    fields = np.zeros((len(order), 3), np.int32)
    for rows, _, end in groups:
        fields[rows, 2] += 1
        fields[rows, 0] = np.maximum(fields[rows, 0], end * PAGE_SIZE)
    fields[1:, 1] = np.cumsum(fields[:-1, 2])
    used = int(fields[:, 2].sum())
    places = _power_of_two(used)
    unread = range(used, places, SEQUENCES)
    array = np.full((_power_of_two(len(groups) + len(unread)), GROUP_FIELDS), -1, np.int32)
    array[:, :2] = 0
    following = fields[:, 1].copy()
    for group, (rows, first, end) in zip(array, groups, strict=False):
        group[:2] = first, end
        group[2 : 2 + len(rows)] = rows
        group[2 + SEQUENCES : 2 + SEQUENCES + len(rows)] = following[rows]
        following[rows] += 1
    for group, at in zip(array[len(groups) :], unread, strict=False):
        count = min(SEQUENCES, places - at)
        group[2 + SEQUENCES : 2 + SEQUENCES + count] = range(at, at + count)
    saved = sum((len(rows) - 1) * (end - first) for rows, first, end in branches)
    return PrefixGroups(mx.array(array), places, fields, saved)


def _branches(order: list[int], shared: list[int]) -> Iterator[Branch]:
    """The branches of the tree: sequences, and the pages [first, end) that all of them share and
    none shares with others besides; those nearer to the root first."""
    open_branches = [(0, len(order), 0)]
    while open_branches:
        first, end, pages = open_branches.pop()
        common = min(shared[first + 1 : end])
        if common > pages:
            yield order[first:end], pages, common
        forks = [at for at in range(first + 1, end) if shared[at] == common]
        open_branches += [
            (begin, stop, common)
            for begin, stop in pairwise([first, *forks, end])
            if stop - begin > 1
        ]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
