"""Rewrites of slabs: what they move, give back and join, and the bytes that they take."""

from collections.abc import Mapping

import pytest

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.format_slabs import IDLE_STEPS, FormatSlabs
from paged_kv.allocator.rewriting import Rewrite
from paged_kv.allocator.slabs import block_range
from paged_kv.allocator.writes import reserve

BLOCK_BYTES, LAYERS = 12, 4


class Rewrites:
    """An allocator of blocks of several layers, which notes the rewrites."""

    def __init__(self, blocks: float = 1000, max_slabs: int = 16) -> None:
        self.made: list[tuple[tuple[int, ...], int]] = []
        self.moves: dict[int, int] = {}
        self.most_mapped = 0
        self.pages_stay = False
        self.budget = ByteBudget(int(blocks * BLOCK_BYTES))
        self.allocator = BlockAllocator(
            self.budget, BLOCK_BYTES, rewrite_slabs=self.rewrite_slabs, max_slabs=max_slabs
        )
        self.add_format("fp16", BLOCK_BYTES)

    def add_format(self, name: str, block_bytes: int) -> FormatSlabs:
        slabs = self.allocator.add_format(name, block_bytes)
        slabs.page_bytes = block_bytes // LAYERS
        return slabs

    def rewrite_slabs(self, rewrite: Rewrite, slab: int, moves: Mapping[int, int]) -> bool:
        self.most_mapped = self.budget.mapped
        if self.pages_stay:
            return False
        self.made.append((rewrite.emptied, rewrite.new_pages))
        self.moves = dict(moves)
        return True

    def with_slabs(self, *used_of: str) -> list[list[int]]:
        """Map slabs, such as "uu.": two used blocks and a free one. Returns the used blocks."""
        (slabs,) = self.allocator.formats
        for slab, pages in enumerate(used_of):
            self.allocator.map(slabs, slab, len(pages))
        ranges = [block_range(slab, len(pages)) for slab, pages in enumerate(used_of)]
        used = [
            [block for block, letter in zip(blocks, pages, strict=True) if letter == "u"]
            for blocks, pages in zip(ranges, used_of, strict=True)
        ]
        for block in (block for blocks in used for block in blocks):
            slabs.take_block(block)
            self.allocator.refs.begin([block])
            table = self.allocator.new_table()
            table.change((block,), 256)
        return used


def block(slab: int, page: int) -> int:
    return block_range(slab, page + 1)[page]


def test_compaction_fills_free_pages_of_other_slabs_first() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("uuuu", "uuuuuu..", "uu..........")
    assert rewrites.allocator.stats().bytes_compactable == 12 * BLOCK_BYTES
    assert rewrites.allocator.compact() == 2
    assert rewrites.made == [((2,), 0)]
    assert rewrites.moves == {block(2, 0): block(1, 6), block(2, 1): block(1, 7)}
    assert rewrites.allocator.slabs == {0: 4, 1: 8}
    assert rewrites.budget.mapped == 12 * BLOCK_BYTES
    assert rewrites.allocator.compact() == 0
    rewrites.allocator.check()


def test_no_page_moves_into_a_slab_that_is_emptied() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("u.....", "uuuu.", "u")
    rewrites.allocator.compact()
    assert rewrites.made == [((0,), 0)]
    assert rewrites.moves == {block(0, 0): block(1, 4)}
    rewrites.allocator.check()


def test_tables_and_caches_follow_their_pages() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("uu", "u...")
    moved: list[tuple[int, int]] = []
    (table,) = [each for each in rewrites.allocator.tables if each.blocks == (block(1, 0),)]
    fork = rewrites.allocator.fork(table)
    rewrites.allocator.keep(block(1, 0), lambda source, target: moved.append((source, target)))
    rewrites.allocator.compact()
    assert rewrites.made == [((1,), 1)]
    new = block(2, 0)
    assert (table.blocks, fork.blocks) == ((new,), (new,))
    assert moved == [(block(1, 0), new)]
    assert rewrites.allocator.ref_count(new) == 3
    rewrites.allocator.check()


def test_compaction_takes_a_new_slab_for_what_fits_nowhere() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("uuuuu.", "uuu.")
    rewrites.allocator.compact()
    assert rewrites.made == [((1,), 2)]
    assert rewrites.moves == {
        block(1, 0): block(0, 5),
        block(1, 1): block(2, 0),
        block(1, 2): block(2, 1),
    }
    assert rewrites.budget.mapped == 8 * BLOCK_BYTES


def test_a_rewrite_holds_one_layers_pages_twice() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("uuuuu.", "uuu.")
    rewrites.allocator.compact()
    assert rewrites.most_mapped == 10 * BLOCK_BYTES + 2 * BLOCK_BYTES // LAYERS


def test_no_rewrite_exceeds_the_budget() -> None:
    rewrites = Rewrites(blocks=10 + 2 / LAYERS - 1 / BLOCK_BYTES)
    rewrites.with_slabs("uuuuu.", "uuu.")
    assert rewrites.allocator.stats().bytes_compactable == 0
    assert (rewrites.allocator.compact(), rewrites.made) == (0, [])


def test_a_full_budget_still_lets_slabs_be_emptied_into_others() -> None:
    rewrites = Rewrites(blocks=12)
    rewrites.with_slabs("uuuu..", "uu.", "uu.")
    assert rewrites.allocator.compact() == 4
    assert rewrites.made == [((1,), 0), ((2,), 2)]
    assert rewrites.budget.mapped == 8 * BLOCK_BYTES


def test_compaction_uses_the_room_that_another_format_gives_back() -> None:
    rewrites = Rewrites(blocks=5)
    rewrites.with_slabs("uuu.")
    rewrites.add_format("q8", BLOCK_BYTES)
    rewrites.allocator.map(rewrites.allocator.format_named("q8"), 1, 1)
    assert rewrites.budget.left == 0
    rewrites.allocator.compact()
    assert rewrites.made == [((1,), 0), ((0,), 3)]


def test_tidying_leaves_a_reserve_of_an_eighth() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("u" * 16, "u.......", "u.......", "u.......", "u.......")
    while rewrites.allocator.tidy():
        rewrites.allocator.check()
    (slabs,) = rewrites.allocator.formats
    assert (slabs.num_used, len(slabs.free), slabs.reserve) == (20, 2, 2)


def test_tidying_copies_few_pages_at_a_time() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs(*["uuuuuuuu........"] * 16)
    copied = []
    while rewrites.allocator.tidy():
        copied.append(len(rewrites.moves))
    assert max(copied) <= 8
    (slabs,) = rewrites.allocator.formats
    assert len(slabs.free) == slabs.reserve == 16


def test_nothing_moves_while_the_reserve_is_not_exceeded() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("u" * 16, "..")
    assert not rewrites.allocator.tidy()


def test_an_empty_slab_goes_when_no_step_has_needed_it_for_long() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("u", ".")
    allocator = rewrites.allocator
    for _ in range(3):
        # Drafts reach into a new page, and are trimmed.
        allocator.release(allocator.allocate(1))
        for _ in range(IDLE_STEPS - 1):
            assert not allocator.tidy()
        assert (allocator.slabs, allocator.is_tidy) == ({0: 1, 1: 1}, False)
    assert not allocator.tidy()
    assert (allocator.slabs, allocator.is_tidy) == ({0: 1}, True)
    assert rewrites.budget.mapped == BLOCK_BYTES
    allocator.check()


def test_what_cannot_move_now_moves_later() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("uu", "u...")
    rewrites.pages_stay = True
    assert not rewrites.allocator.tidy()
    assert rewrites.allocator.compact() == 0
    assert (rewrites.allocator.slabs, rewrites.budget.mapped) == ({0: 2, 1: 4}, 6 * BLOCK_BYTES)
    rewrites.pages_stay = False
    assert rewrites.allocator.compact() == 1
    rewrites.allocator.check()


def test_a_rewrite_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("uu", "u...")

    def fail(*_: object) -> bool:
        raise MemoryError("planted")

    monkeypatch.setattr(rewrites.allocator, "_rewrite_slabs", fail)
    with pytest.raises(MemoryError):
        rewrites.allocator.compact()
    assert (rewrites.allocator.slabs, rewrites.budget.mapped) == ({0: 2, 1: 4}, 6 * BLOCK_BYTES)
    rewrites.allocator.check()


def test_the_smallest_slabs_grow_when_there_are_as_many_as_a_kernel_takes() -> None:
    """As many of them as a step may copy: eight pages of a few."""
    rewrites = Rewrites(max_slabs=3)
    rewrites.with_slabs("uuuuuu", "u", "uu.")
    rewrites.allocator.ensure_free({"fp16": 2})
    assert rewrites.made == [((1, 2), 5)]
    new = [block(3, page) for page in range(3)]
    assert rewrites.moves == dict(zip([block(1, 0), block(2, 0), block(2, 1)], new, strict=True))
    assert rewrites.allocator.slabs == {0: 6, 3: 5}
    assert rewrites.most_mapped == 11 * BLOCK_BYTES + 4 * BLOCK_BYTES // LAYERS
    assert rewrites.budget.mapped == 11 * BLOCK_BYTES
    rewrites.allocator.check()


def test_one_slab_grows_however_many_pages_it_has() -> None:
    rewrites = Rewrites(max_slabs=2)
    rewrites.with_slabs("u" * 10, "u" * 9)
    rewrites.allocator.ensure_free({"fp16": 1})
    assert rewrites.made == [((1,), 10)]


def test_slabs_grow_without_those_whose_pages_the_budget_does_not_hold_twice() -> None:
    rewrites = Rewrites(blocks=62 + 1 + 5 / LAYERS, max_slabs=10)
    rewrites.with_slabs(*["u" * 7] * 8, *["uuu"] * 2)
    rewrites.allocator.ensure_free({"fp16": 1})
    assert rewrites.made == [((8,), 4)]
    assert rewrites.most_mapped == 63 * BLOCK_BYTES + 3 * BLOCK_BYTES // LAYERS


def test_slabs_of_another_format_are_joined_for_the_first_one_of_a_format() -> None:
    rewrites = Rewrites(max_slabs=4)
    rewrites.with_slabs("uuuuuu", "u", "u.", "uuuuuuuu")
    rewrites.add_format("q8", 8)
    rewrites.allocator.ensure_free({"q8": 1})
    assert rewrites.made == [((1, 2, 0), 9)]
    fp16, q8 = rewrites.allocator.formats
    assert (len(fp16.slabs), len(q8.slabs), len(fp16.free), len(q8.free)) == (2, 1, 1, 1)
    rewrites.allocator.check()


def test_that_is_copied_which_costs_least_for_each_slab_less() -> None:
    """Growing q8 would copy two pages for a slab, and joining those of fp16 three for two."""
    rewrites = Rewrites(max_slabs=5)
    rewrites.with_slabs("u", "u", "u")
    q8 = rewrites.add_format("q8", BLOCK_BYTES)
    for slab, pages in ((3, 2), (4, 9)):
        rewrites.allocator.map(q8, slab, pages)
        rewrites.allocator.refs.begin(q8.take(pages))
    rewrites.allocator.ensure_free({"q8": 1})
    assert rewrites.made == [((0, 1, 2), 3)]


def test_where_pages_cannot_move_there_are_more_slabs_until_they_can() -> None:
    rewrites = Rewrites(max_slabs=3)
    rewrites.with_slabs("uuuuuuuu", "u", "uuuuuuuu")
    rewrites.pages_stay = True
    rewrites.allocator.ensure_free({"fp16": 1})
    assert len(rewrites.allocator.slabs) == 4
    rewrites.pages_stay = False
    assert rewrites.allocator.tidy()
    assert len(rewrites.allocator.slabs) == 3
    assert not rewrites.allocator.tidy()


def test_no_slab_is_joined_beyond_an_eighth_of_the_budget() -> None:
    rewrites = Rewrites(blocks=32, max_slabs=3)
    rewrites.with_slabs("uuuu", "uuuu", "uuuu")
    rewrites.allocator.ensure_free({"fp16": 1})
    assert (rewrites.made, len(rewrites.allocator.slabs)) == ([], 4)


@pytest.mark.parametrize(("pages", "free", "copied"), [(128, 0, 1.1), (2000, 0.016, 3.7)])
def test_growth_maps_a_64th_ahead_and_copies_a_sixteenth_at_most(
    pages: int, free: float, copied: float
) -> None:
    rewrites = Rewrites(blocks=4096)
    allocator, counts = rewrites.allocator, list[int]()
    table = allocator.new_table()
    for page in range(pages):
        rewrites.moves = {}
        allocator.ensure_free({"fp16": 1})
        counts.append(len(rewrites.moves))
        assert counts[-1] <= max(8, page // 16)
        reserve(table, page * 256, (page + 1) * 256)
        assert allocator.capacity - page - 1 <= free * page
    assert len(allocator.slabs) <= 16
    assert sum(counts) <= copied * pages
