"""Makes the array that describes a batch to code whose numbers are arrays: to the GPU kernels, and
to recorded steps.

An entry of a table is slab * slab_stride + page, as everywhere, but numbers only the slabs that
occur.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.kernels.pages.prefix_groups import PrefixGroups, prefix_groups

ROW_FIELDS = 7
# The width of tables is a multiple of this, so that few different widths occur.
TABLE_WIDTH = 16
# The reach of tables is a multiple of this, and of an eighth of itself: so few different reaches
# occur, and all that is planned for one lasts for many steps.
LEAST_REACH = 1024


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
        """The same with other arrays."""
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
