"""Groups of sequences read every shared page once for each of their sequences."""

from collections.abc import Sequence

import numpy as np
import pytest

from paged_kv.kernels.pages import tables as module
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, BlockTables
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.kernels.pages.tables import SEQUENCES, PrefixGroups, Tables, prefix_groups, tables_of

Table = tuple[int, ...]


@pytest.fixture(autouse=True)
def groups_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SAVED", 1)


def shared_with_others(tables: Sequence[Table], row: int) -> int:
    """How many of a table's first pages another one begins with too."""
    counts = []
    for other, table in enumerate(tables):
        pairs = zip(table, tables[row], strict=False)
        equal = [at for at, (a, b) in enumerate(pairs, 1) if table[:at] == tables[row][:at]]
        counts.append(len(equal) if other != row else 0)
    return max(counts)


def assert_reads_once(tables: Sequence[Table], groups: PrefixGroups) -> None:
    array, fields = np.array(groups.array), groups.fields
    read: list[list[int]] = [[] for _ in tables]
    places: list[int] = []
    for first, end, *rest in array.tolist():
        rows = [row for row in rest[:SEQUENCES] if row >= 0]
        for row, place in zip(rest[:SEQUENCES], rest[SEQUENCES:], strict=True):
            places += [place] if place >= 0 else []
            assert row < 0 or fields[row, 1] <= place < fields[row, 1] + fields[row, 2]
        assert len({tables[row][first:end] for row in rows}) == (1 if rows else 0)
        for row in rows:
            read[row] += range(first, end)
    assert sorted(places) == [*range(groups.places)]
    for row, pages in enumerate(read):
        assert sorted(pages) == [*range(shared_with_others(tables, row))]
        assert fields[row, 0] == len(pages) * PAGE_SIZE


def test_more_sequences_than_a_group_has() -> None:
    tables = [(0, 1, 2, 3, 4, 10 + row // 3, 100 + row) for row in range(2 * SEQUENCES + 1)]
    groups = prefix_groups(BlockTables(tables).shared_pages)
    assert groups is not None
    assert_reads_once(tables, groups)


def _tables(shared: int, own: int) -> Tables:
    rows = [(*range(shared), *(100 + 10 * row + page for page in range(own))) for row in range(3)]
    lengths = (len(rows[0]) * PAGE_SIZE,) * 3
    return tables_of(AttentionMetadata(tuple(rows), lengths, (0,) * 3), 1 << 10)


def test_launches_depend_on_the_number_of_groups() -> None:
    few, more, none = _tables(4, 3), _tables(5, 2), _tables(0, 7)
    assert len({each.key for each in (few, more, none)}) == 3
    assert [each.reach for each in (few, more, none)] == [2048] * 3
    assert [each.own_reach for each in (few, more, none)] == [1024, 1024, 2048]
    assert [array.shape[0] for array in more.arrays] == [3, 4]
    assert len(none.arrays) == 1
