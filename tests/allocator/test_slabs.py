"""Rewrites of slabs: what they move, give back and join, and the bytes that they take."""

from collections.abc import Mapping

import pytest

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.slabs import IDLE_STEPS, FormatSlabs, Rewrite, block_range
from tests.support.reserving import reserve

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


@pytest.mark.parametrize(
    ("blocks", "slabs", "made", "left"),
    [
        (1000, ["uuuu", "uuuuuu..", "uu.........."], [((2,), 0)], 12),
        (1000, ["u.....", "uuuu.", "u"], [((0,), 0)], 6),
        (1000, ["uuuuu.", "uuu."], [((1,), 2)], 8),
        # The rewrite would need a byte more.
        (10 + 2 / LAYERS - 1 / BLOCK_BYTES, ["uuuuu.", "uuu."], [], 10),
        (12, ["uuuu..", "uu.", "uu."], [((1,), 0), ((2,), 2)], 8),
    ],
)
def test_compaction_within_the_budget(
    blocks: float, slabs: list[str], made: list[tuple[tuple[int, ...], int]], left: int
) -> None:
    rewrites = Rewrites(blocks)
    rewrites.with_slabs(*slabs)
    rewrites.allocator.compact()
    assert rewrites.made == made
    assert rewrites.budget.mapped == left * BLOCK_BYTES
    assert rewrites.allocator.compact() == rewrites.allocator.stats().bytes_compactable == 0
    rewrites.allocator.check()


def test_a_rewrite_holds_one_layers_pages_twice() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("uuuuu.", "uuu.")
    rewrites.allocator.compact()
    assert rewrites.most_mapped == 10 * BLOCK_BYTES + 2 * BLOCK_BYTES // LAYERS
    targets = [block(0, 5), block(2, 0), block(2, 1)]
    assert rewrites.moves == {block(1, page): each for page, each in enumerate(targets)}


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


def test_an_empty_slab_goes_when_no_step_has_needed_it_for_long() -> None:
    rewrites = Rewrites()
    rewrites.with_slabs("u", ".")
    allocator = rewrites.allocator
    for _ in range(3):
        # Drafts reach into a new page, and are trimmed.
        allocator.release(allocator.allocate(1))
        for _ in range(IDLE_STEPS - 1):
            assert not allocator.tidy()
        assert allocator.slabs == {0: 1, 1: 1}
    assert not allocator.tidy()
    assert (allocator.slabs, allocator.tidy()) == ({0: 1}, False)
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

    monkeypatch.setattr(rewrites.allocator, "rewrite_slabs", fail)
    with pytest.raises(MemoryError):
        rewrites.allocator.compact()
    assert (rewrites.allocator.slabs, rewrites.budget.mapped) == ({0: 2, 1: 4}, 6 * BLOCK_BYTES)
    rewrites.allocator.check()


@pytest.mark.parametrize(
    ("blocks", "max_slabs", "slabs", "needed", "made", "most"),
    [
        # As many of the smallest as a step may copy: eight pages of a few.
        (1000, 3, ["uuuuuu", "u", "uu."], 2, [((1, 2), 5)], 11 + 4 / LAYERS),
        # One slab, however many pages it has.
        (1000, 2, ["u" * 10, "u" * 9], 1, [((1,), 10)], 20 + 9 / LAYERS),
        # None of which the budget does not hold the pages twice.
        (62 + 1 + 5 / LAYERS, 10, ["u" * 7] * 8 + ["uuu"] * 2, 1, [((8,), 4)], 63 + 3 / LAYERS),
        # None beyond an eighth of the budget.
        (32, 3, ["uuuu", "uuuu", "uuuu"], 1, [], 0),
    ],
)
def test_slabs_grow_when_there_are_as_many_as_a_kernel_takes(
    blocks: float,
    max_slabs: int,
    slabs: list[str],
    needed: int,
    made: list[tuple[tuple[int, ...], int]],
    most: float,
) -> None:
    rewrites = Rewrites(blocks, max_slabs)
    rewrites.with_slabs(*slabs)
    rewrites.allocator.ensure_free({"fp16": needed})
    assert (rewrites.made, rewrites.most_mapped) == (made, most * BLOCK_BYTES)
    assert len(rewrites.allocator.slabs) <= max_slabs + (not made)
    rewrites.allocator.check()


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
