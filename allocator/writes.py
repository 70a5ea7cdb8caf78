"""Plans the blocks of coming writes, which changes nothing, and carries plans out: all, or none.

A plan names entries and formats of tables, not blocks. So it can be made again whenever memory was
reclaimed for it, which may evict, move or recode blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paged_kv.allocator.block_allocator import BlockTable

CopyPages = Callable[[Mapping[int, int]], None]
"""Called with page copies (from block, to block), to make them."""


@dataclass(frozen=True)
class Write:
    """A coming write of the tokens at [start, end) through a table."""

    table: BlockTable
    start: int
    end: int
    step_end: int = 0  # the end of the step, if other writes of it follow

    @property
    def is_owned(self) -> bool:
        """Whether it needs no other block: see `BlockTable.owns`."""
        return self.table.owns(self.start, self.end)

    @property
    def left_pages(self) -> range:
        """The pages that the write fills, and the step leaves."""
        size = self.table.allocator.page_size
        last = (max(self.end, self.step_end) - 1) // size
        return range(self.start // size, min(last, -(-self.end // size)))

    @property
    def begins_within_page(self) -> bool:
        """Whether its first page holds earlier tokens."""
        return self.start % self.table.allocator.page_size > 0

    @property
    def recoded_pages(self) -> range:
        """Those of `left_pages` that are to be recoded within the write: its later tokens read them
        in the table's formats of full blocks."""
        return self.left_pages if self.table.recodes else range(0)

    @property
    def needs_scratch(self) -> bool:
        """Whether the first of `recoded_pages` holds earlier tokens. Its block stays as it is until
        the next write, so that a trim finds these tokens as they were written. A block beside the
        table holds the recoded page meanwhile."""
        return bool(self.recoded_pages) and self.begins_within_page

    @property
    def scratch_format(self) -> str:
        """The format of that block."""
        return self.table.full_format(self.recoded_pages.start)

    def format_of(self, page: int) -> str:
        """The format that a page's block must have when the write begins.

        A page that the write fills whole and leaves gets a block of the format that it has when it
        is full: its tokens are first written in the block of the last page, and then recoded into
        this one. All other pages are written in their own blocks, so these have the allocator's
        format."""
        whole = self.recoded_pages[1:] if self.needs_scratch else self.recoded_pages
        return self.table.full_format(page) if page in whole else self.table.allocator.page_format

    def written_entries(self) -> dict[int, str]:
        """The entries that the table has and that are written, with the formats they need."""
        table = self.table
        if self.start >= self.end:
            return {}
        pages = range(self.start // table.allocator.page_size, table.pages_of(self.end))
        entry_of = table.ring.entry if table.ring else int
        formats = {entry_of(page): self.format_of(page) for page in pages}
        return {entry: formats[entry] for entry in sorted(formats) if entry < len(table.blocks)}

    @property
    def is_reserved(self) -> bool:
        """Whether its blocks are reserved, see `BlockTable.is_reserved`, and the last page can be
        written as it is. If layers take different steps, an earlier step may have reserved that
        page as one to leave."""
        table = self.table
        return table.is_reserved(self.end) and all(
            table.allocator.is_writable(block) for block in table.blocks_of(self.end - 1, self.end)
        )

    def by_page(self) -> list[Write]:
        """The same tokens as one write per page."""
        size = self.table.allocator.page_size
        borders = range(self.start - self.start % size + size, self.end, size)
        starts, ends = (self.start, *borders), (*borders, self.end)
        return [Write(self.table, *each, self.end) for each in zip(starts, ends, strict=True)]


@dataclass
class WritePlan:
    """The blocks that a write needs beside those of its table."""

    write: Write
    copied: dict[int, str]  # the formats of blocks that replace others, as copies, by entry
    appended: list[str]  # the formats of blocks behind the table's
    blocks: tuple[int, ...] = ()  # those of the table after the write, once they are allocated
    copies: dict[int, int] = field(default_factory=dict)  # of pages (from block, to block)

    def take(self, fresh: Mapping[str, Iterator[int]]) -> None:
        """Take the blocks from free ones of each format."""
        blocks = list(self.write.table.blocks)
        for entry, name in self.copied.items():
            self.copies[blocks[entry]] = blocks[entry] = next(fresh[name])
        blocks += [next(fresh[name]) for name in self.appended]
        is_changed = self.copied or self.appended
        self.blocks = tuple(blocks) if is_changed else self.write.table.blocks

    def give_back(self) -> None:
        """Give back what `take` has taken."""
        fresh = self.blocks[len(self.blocks) - len(self.appended) :]
        self.write.table.allocator.release([*self.copies.values(), *fresh])


def planned(writes: list[Write]) -> list[WritePlan]:
    """What these writes need, through tables of one allocator. Changes nothing.

    Copies take the place of blocks that are shared or have another format. Of the tables that share
    a block, the last writer keeps it and needs no copy, unless it needs another format.
    """
    references: dict[int, int] = {}
    plans = []
    for allocator in {write.table.allocator for write in writes}:
        # Drop tables now, not between the plan and the copies, where sources must stay in use.
        allocator.drain()
    for write in writes:
        table, allocator = write.table, write.table.allocator
        assert table in allocator.tables, "this table was dropped"
        if write.is_owned:
            plans.append(WritePlan(write, {}, []))
            continue
        copied = {}
        for entry, name in write.written_entries().items():
            block = table.blocks[entry]
            count = references.setdefault(block, allocator.ref_count(block))
            if count > 1 or allocator.format_of(block).name != name:
                copied[entry] = name
                references[block] = count - 1
        missing = range(len(table.blocks), table.entries_for(write.end))
        plans.append(WritePlan(write, copied, [write.format_of(page) for page in missing]))
    return plans


def blocks_needed(writes: list[Write]) -> Counter[str]:
    """Blocks of each format that reserving all `writes`, through tables of one allocator, will
    allocate."""
    return _needed(planned(writes))


def reserve_all(writes: Iterable[tuple[list[Write], CopyPages]]) -> None:
    """Reserve blocks for all writes; each list is of one allocator, whose pages the call copies.

    Tables change after all pages are copied, so that none ever refers to a page that was not.

    Raises:
        PoolExhausted: too few blocks are available; nothing was changed.
        BaseException: what copying raises; nothing was changed.
    """
    taken: list[WritePlan] = []
    try:
        for theirs, copy_pages in writes:
            plans = planned(theirs)
            needs = _needed(plans)
            allocated = theirs[0].table.allocator.take_free(needs) if needs else {}
            fresh = {name: iter(blocks) for name, blocks in allocated.items()}
            for plan in plans:
                plan.take(fresh)
            taken += plans
            for plan in plans:
                if plan.copies:
                    copy_pages(plan.copies)
    except BaseException:
        for plan in taken:
            plan.give_back()
        raise
    for plan in taken:
        write = plan.write
        write.table.commit(write.start, write.end, plan.blocks, plan.copies)


def _needed(plans: list[WritePlan]) -> Counter[str]:
    return Counter(name for plan in plans for name in (*plan.copied.values(), *plan.appended))
