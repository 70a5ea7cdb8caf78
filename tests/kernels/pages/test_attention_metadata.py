"""Which sequences of a batch share pages, against a comparison of every pair of tables."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, BlockTables, Table
from tests.support.attention_metadata import unpadded
from tests.support.examples import examples


def shared_by(one: Table, other: Table) -> int:
    """The number of first entries that two tables have in common."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


# Few different blocks, so that tables begin alike, fork, and end within each other.
tables = st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), min_size=1, max_size=9)


@examples(150)
@given(tables)
def test_the_pages_that_any_two_sequences_share_are_the_fewest_between_them(
    given_tables: list[Table],
) -> None:
    found = BlockTables(given_tables).shared_pages
    count = len(given_tables)
    pairs = {
        (i, j): shared_by(given_tables[i], given_tables[j]) for i in range(count) for j in range(i)
    }
    if found is None:
        assert not any(pairs.values())
        return
    assert sorted(found.order) == list(range(count))
    assert found.shared[0] == 0
    for first in range(count):
        for last in range(first + 1, count):
            i, j = sorted((int(found.order[first]), int(found.order[last])), reverse=True)
            assert pairs[i, j] == min(found.shared[first + 1 : last + 1])


def test_what_fills_shorter_tables_is_an_entry_of_this_step() -> None:
    """A block of an earlier step may have moved since, and its slab be gone."""
    before = BlockTables([(7, 8), (1,)])
    assert before.array.tolist() == [[7, 8], [1, 7]]
    assert before.after([(3, 4), before[1]]).array.tolist() == [[3, 4], [1, 3]]


def test_pages_of_rings_count_as_each_sequences_own() -> None:
    tables = ((1, 2), (1, 2))
    assert unpadded(tables, (300, 300)).shared_pages is not None
    ring = AttentionMetadata(tables, (300, 300), (0, 0), first_tokens=(40, 40))
    assert ring.shared_pages is None
