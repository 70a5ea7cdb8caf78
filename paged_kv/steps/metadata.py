"""Makes the attention metadata of a step: where the kernels find the tokens that it attends to.

A token attends to its own page in 16 bits, and to every earlier page in the sequence's format. So a
step is cut where a row of it begins a page, and its parts are written and attended to one after the
other. Each recodes the pages that it has filled.

A page that is recoded into a block of few bits is written in the block of the step's last page. So
it does not matter when the block got its format: when it was reserved, or since, because memory got
short and the pool requantised it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.writes import Write
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.window import Window
from paged_kv.steps.sequence import StepRow


def attention_metadata(
    group: LayerGroup, rows: list[StepRow], *, read_first: bool = False
) -> AttentionMetadata:
    """The attention metadata of a step in the layers of a group.

    With `read_first`, no page holds the step itself yet.
    """
    if group.window is not None:
        return _ring_metadata(group, group.window, rows, read_first)
    tables, ends, right_padding = [], [], []
    for sequence, _, (end, _, padding) in rows:
        table = sequence.tables.get(group)
        tables.append(() if table is None else table.blocks)
        ends.append(end)
        right_padding.append(padding.right)
    group.latest_tables = group.latest_tables.after(tables)
    return AttentionMetadata(group.latest_tables, tuple(ends), tuple(right_padding))


class StepPart(NamedTuple):
    """The tokens of a step between two cuts.

    Attributes:
        tokens: which of the step's S tokens they are.
        metadata: where all tokens up to these are while the queries of these attend.
        resumed: the page copies (from block, to block) to make before the part is written.
        recoded: the page copies to make before the next part attends.
    """

    tokens: slice
    metadata: AttentionMetadata
    resumed: dict[int, int]
    recoded: dict[int, int]


def step_parts(
    group: LayerGroup, rows: list[StepRow], count: int, scratch: Mapping[str, BlockTable]
) -> list[StepPart]:
    """The parts of a step of `count` tokens, padding included; none if it recodes no page.

    `scratch` holds the recoded page that a row's step begins in, by uid: see `Write.needs_scratch`.
    """
    pages = [_RowPages(group, row, scratch.get(row.sequence.uid)) for row in rows]
    cuts = sorted({cut for row in pages for cut in row.cuts})
    if not cuts:
        return []
    parts = []
    resumed = {source: to for row in pages for source, to in row.resumed.items()}
    for start, end in zip((0, *cuts), (*cuts, count), strict=True):
        tables, lengths, padding = zip(*[row.metadata(end) for row in pages], strict=True)
        recoded = {source: to for row in pages for source, to in row.recoded_at(end)}
        metadata = AttentionMetadata(tables, lengths, padding)
        parts.append(StepPart(slice(start, end), metadata, {} if start else resumed, recoded))
    return parts


class _RowPages:
    """The pages of one sequence during a step.

    Attributes:
        cuts: the indices of the step's tokens that begin a page after one that is recoded.
        resumed: the page copy that gives the step's first page 16 bits again, if it needs one.
    """

    def __init__(self, group: LayerGroup, row: StepRow, scratch: BlockTable | None) -> None:
        self._row = row
        self._blocks = row.sequence.blocks(group)
        # By page: the block that its tokens are written in, and the one that it is recoded into.
        self._recoded: dict[int, tuple[int, int]] = {}
        self.resumed: dict[int, int] = {}
        if group.window is None and self._blocks:
            self._find_recoded(row.sequence.table(group), scratch)
        self.cuts = [(page + 1) * PAGE_SIZE - row.before.offset for page in self._recoded]

    def metadata(self, end: int) -> tuple[tuple[int, ...], int, int]:
        """Block table, context length and right padding at the step's first `end` tokens."""
        _, before, after = self._row
        position = before.offset + end
        length = min(max(position, before.tokens), after.tokens)
        latest = max(0, length - 1) // PAGE_SIZE
        blocks = list(self._blocks[: latest + 1])
        for page, (written, recoded) in self._recoded.items():
            if page <= latest:
                blocks[page] = written if page == latest else recoded
        return tuple(blocks), length, max(0, position - length)

    def recoded_at(self, end: int) -> list[tuple[int, int]]:
        """The page copy to make after the step's first `end` tokens, if any."""
        page = (self._row.before.offset + end) // PAGE_SIZE - 1
        is_cut = end in self.cuts
        return [self._recoded[page]] if is_cut else []

    def _find_recoded(self, table: BlockTable, scratch: BlockTable | None) -> None:
        write = Write(table, self._row.before.tokens, self._row.after.tokens)
        for page in write.left_pages:
            block, last = table.blocks[page], table.blocks[write.left_pages.stop]
            holds_earlier = page == write.left_pages.start and write.begins_within_page
            if not table.allocator.is_writable(block):
                self._recoded[page] = last, block
                if holds_earlier:
                    self.resumed = {block: last}
            elif holds_earlier and scratch is not None:
                self._recoded[page] = block, scratch.blocks[0]


def _ring_metadata(
    group: LayerGroup,
    window: Window,
    rows: list[StepRow],
    read_first: bool,
) -> AttentionMetadata:
    """Metadata for a window. Each table begins with the page of the first token in the window of
    the step's first query, preceded by the head's pages if they are not adjacent."""
    tables, lengths, firsts, heads = [], [], [], []
    for sequence, (before, *_), (end, *_) in rows:
        first, sink_tokens = window.first_visible(before), window.sink_tokens
        if first <= sink_tokens:
            first = sink_tokens = 0
        apart = first >= window.head_end > 0
        base = 0 if first < window.head_end else first - first % PAGE_SIZE
        table = sequence.table(group)
        head = table.blocks_of(0, window.head_end) if apart else ()
        tables.append(head + table.blocks_of(base, before if read_first else end))
        shift = len(head) * PAGE_SIZE - base
        lengths.append(end + shift)
        firsts.append(first + shift if first else 0)
        heads.append(sink_tokens)
    head_tokens = tuple(heads) if window.sink_tokens else ()
    padding = tuple([row.after.padding.right for row in rows])
    return AttentionMetadata(tuple(tables), tuple(lengths), padding, tuple(firsts), head_tokens)
