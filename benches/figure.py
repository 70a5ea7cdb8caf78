"""The figure of README.md: python -m benches.figure

Three sequences of a small allocator, their block tables, and the slabs that hold their pages. A
block is called by the two parts of its id, which is the allocator's own. The figure brings a white
panel with it, so that it can be read on a light and on a dark page.
"""

from collections.abc import Iterator
from pathlib import Path

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.slab_allocator import SlabAllocator
from paged_kv.allocator.slabs import block_range, page_of, slab_of
from paged_kv.sizes import counted
from tests.support.reserving import reserve

FIGURE = Path(__file__).parents[1] / "docs" / "pictures" / "blocks.svg"
WIDTH, HEIGHT = 820, 420
TOP, ROW = 70, 84
TABLES_X, SLABS_X = 240, 580
ENTRY, PAGE, HIGH = 56, 44, 30
OWN, SHARED, LINE, INK = "#9ecae1", "#d4b9da", "#8c959f", "#24292f"


def main() -> None:
    FIGURE.write_text(figure(), encoding="utf-8")


def figure() -> str:
    """The figure as SVG."""
    allocator, sequences = example()
    pages = {block: _page(block) for table in sequences.values() for block in table.blocks}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="14">',
        "<title>Sequences, their block tables, and the slabs that hold their pages</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="{LINE}"/>',
        *_heads(),
        *_slabs(allocator),
    ]
    for row, (name, table) in enumerate(sequences.items()):
        lines += _sequence(name, table, TOP + ROW * row, pages)
    return "\n".join([*lines, *_legend(), "</svg>\n"])


def example() -> tuple[BlockAllocator, dict[str, BlockTable]]:
    """A sequence, a fork of it that has copied its last block, and another sequence."""
    allocator = BlockAllocator(ByteBudget(64 << 20), block_bytes=1 << 20)
    first, other = allocator.new_table(), allocator.new_table()
    reserve(first, 0, 700)
    fork = allocator.fork(first)
    reserve(fork, 700, 760)
    reserve(other, 0, 300)
    return allocator, {"A": first, "B, a fork of A": fork, "C": other}


def _heads() -> Iterator[str]:
    for x, text in (
        (20, "sequences"),
        (TABLES_X, "block tables: one entry for 256 tokens"),
        (SLABS_X, "slabs: a page for each block"),
    ):
        yield _text(x, 34, text, weight="bold")


def _sequence(name: str, table: BlockTable, y: int, pages: dict[int, tuple[int, int]]) -> list[str]:
    lines = [
        _text(20, y + 14, f"sequence {name}"),
        _text(20, y + 32, f"{table.tokens} tokens", colour="#57606a"),
        f'<path d="M192 {y + 15} H{TABLES_X - 8}" stroke="{LINE}"/>',
    ]
    for at, block in enumerate(table.blocks):
        x = TABLES_X + ENTRY * at
        lines.append(_box(x, y, ENTRY, _name(block), _colour(table.allocator, block)))
        lines.append(_arrow((x + ENTRY // 2, y), pages[block]))
    return lines


def _arrow(entry: tuple[int, int], page: tuple[int, int]) -> str:
    """From an entry to the lower edge of its page; it leaves from the edge that is nearer."""
    (x, y), (to_x, to_y) = entry, (page[0] + PAGE // 2, page[1] + HIGH)
    leaves, bend = (y, -30) if y > to_y else (y + HIGH, 30)
    return (
        f'<path d="M{x} {leaves} C{x} {leaves + bend} {to_x} {to_y + 40} {to_x} {to_y}" '
        f'fill="none" stroke="{LINE}"/>'
    )


def _legend() -> Iterator[str]:
    for x, colour, text in ((20, OWN, "of one sequence"), (190, SHARED, "shared")):
        yield _box(x, HEIGHT - 44, 24, "", colour)
        yield _text(x + 32, HEIGHT - 24, text)
    # The block that the fork has copied: it is the first of its slab.
    block = next(iter(block_range(1, 1)))
    text = f"{_name(block)} is page {page_of(block)} of slab {slab_of(block)}, as integer {block:,}"
    yield _text(WIDTH - 20, HEIGHT - 24, text, anchor="end")


def _name(block: int) -> str:
    return f"{slab_of(block)}:{page_of(block)}"


def _slabs(allocator: BlockAllocator) -> Iterator[str]:
    for slab, pages in allocator.slabs.items():
        _, y = _page(slab << 16)
        yield _text(SLABS_X, y - 10, f"slab {slab}, {counted(pages, 'page')}", colour="#57606a")
        for block in list(block_range(slab, pages))[:5]:
            x, y = _page(block)
            yield _box(x, y, PAGE, str(page_of(block)), _colour(allocator, block))
        if pages > 5:
            yield _text(_page((slab << 16) + 5)[0] + 4, y + 20, "...")


def _page(block: int) -> tuple[int, int]:
    """Where a page is drawn."""
    return SLABS_X + PAGE * page_of(block), TOP + 20 + 110 * slab_of(block)


def _colour(allocator: SlabAllocator[BlockTable], block: int) -> str:
    """Of a block: whose it is. Each of the example is a sequence's."""
    return SHARED if allocator.ref_count(block) > 1 else OWN


def _box(x: int, y: int, width: int, text: str, colour: str) -> str:
    middle = _text(x + width // 2, y + 20, text, anchor="middle")
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{HIGH}" fill="{colour}" '
        f'stroke="{INK}"/>{middle}'
    )


def _text(
    x: int, y: int, text: str, *, weight: str = "normal", colour: str = INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


if __name__ == "__main__":
    main()
