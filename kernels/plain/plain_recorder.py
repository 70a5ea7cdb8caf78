"""Lets plain operations be recorded: they find tokens by arrays instead of Python numbers.

They read all pages that the tables have room for, and hide what is no token. MLX cannot write a
slab in place while its memory is shared, so a step replaces it.
"""

from collections.abc import Callable, Hashable

import mlx.core as mx

from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.choice import RUNS_OF_PAGE, chooses, chosen_runs, run_scores
from paged_kv.kernels.pages.layer_memory import LayerMemory, Slab
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE
from paged_kv.kernels.pages.summaries import RUN_TOKENS
from paged_kv.kernels.pages.tables import ROW_FIELDS, Tables, tables_of
from paged_kv.kernels.plain import row_attention
from paged_kv.kernels.plain.plain_backend import PlainBackend, slot_lines, summarise


class PlainRecorder:
    """See `StepRecorder` for the operations."""

    pays = False

    def key(self, pages: LayerPages, tables: Tables) -> Hashable:
        slabs = [pages.slabs[number] for number in tables.slabs]
        return tuple((slab.memory.shape, slab.layout) for slab in slabs)

    def arrays(self, pages: LayerPages, tables: Tables) -> list[mx.array]:
        return [pages.slabs[number].memory for number in tables.slabs]

    def stand_in(self, pages: LayerPages, tables: Tables, arrays: list[mx.array]) -> LayerPages:
        stand_in = LayerPages(
            pages.geometry, _RecordedOperations(), pages.slab_stride, pages.read_tokens
        )
        for number, memory in zip(tables.slabs, arrays, strict=True):
            stand_in.slabs[number] = Slab(memory, pages.slabs[number].layout)
        return stand_in

    def changes(self, tables: Tables) -> int:
        return len(tables.slabs)

    def changed(self, stand_in: LayerPages, tables: Tables) -> list[mx.array]:
        return self.arrays(stand_in, tables)

    def keep(
        self, pages: LayerPages, tables: Tables, changed: list[mx.array], filled: list[int]
    ) -> None:
        """Computes them, as every write of plain operations does."""
        for number, memory in zip(tables.slabs, changed, strict=True):
            pages.slabs[number].memory = memory
        if pages.geometry.has_summaries:
            for entry in filled:
                summarise(pages, entry)
        mx.eval(self.arrays(pages, tables))


class _RecordedOperations(PlainBackend):
    """Plain operations of a step of one token per sequence, by the arrays of `Tables`."""

    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        tables = tables_of(metadata, pages.slab_stride)
        position = tables.array[:, :1] - 1
        entries = tables.array[:, ROW_FIELDS:]
        entry = mx.take_along_axis(entries, position // PAGE_SIZE, axis=1)[:, 0]
        slot = position[:, 0] % PAGE_SIZE
        for at, number in enumerate(tables.slabs):
            slab, is_here = pages.slabs[number], entry // pages.slab_stride == at
            if slab.layout.page_format == FP16:
                page = mx.where(is_here, entry % pages.slab_stride, 0)
                _write(slab, keys, values, page, slot, is_here)

    def attend(
        self,
        pages: LayerMemory,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        unwritten: Unwritten | None = None,
        position_queries: mx.array | None = None,
        *,
        step: Unwritten | None = None,
    ) -> mx.array:
        if step is not None:
            self.write(pages, *step, metadata)
        keys, values, is_seen = _read(pages, metadata, attention)
        if position_queries is not None:
            return row_attention.latent_attention(
                queries, position_queries, keys, values, attention, is_seen
            )
        if chooses(attention, metadata, queries.shape[2]):
            is_seen = is_seen & _is_chosen(pages, queries, metadata, attention)
        if attention.softcap is not None:
            return row_attention.softcapped(queries, keys, values, attention, is_seen)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=attention.scale, mask=is_seen, sinks=attention.sinks
        )


def _write(
    slab: Slab,
    keys: mx.array,
    values: mx.array,
    page: mx.array,
    slot: mx.array,
    is_here: mx.array,
) -> None:
    """Write a token of each sequence to a page and slot of a slab, int32 [B], if it is here."""
    layout = slab.layout
    encoded = layout.page_format.encode(keys, values)
    for plane, offset, words in zip(layout.planes, layout.offsets, encoded, strict=True):
        if plane.words:
            first = page * layout.page_units + offset // layout.unit_words
            lines = slot_lines(first, slot, plane, layout.unit_words)
            new = words.reshape(-1, layout.unit_words)
            is_new = mx.repeat(is_here, lines.size // is_here.size)[:, None]
            # Added, so that a token of another slab changes nothing wherever it points.
            difference = mx.where(is_new, new - slab.memory[lines], 0)
            slab.memory = slab.memory.at[lines].add(difference)


def _read(
    pages: LayerMemory, metadata: AttentionMetadata, attention: Attention
) -> tuple[mx.array, mx.array, mx.array]:
    """Keys and values [B, heads, T, dim] of all pages that the tables have room for, zeros where
    there is no token, and which of them the query sees, boolean [B, 1, 1, T]."""
    tables = tables_of(metadata, pages.slab_stride)
    length, _, head_tokens, first_token = (tables.array[:, at : at + 1] for at in range(4))
    count = tables.reach // PAGE_SIZE
    entries = tables.array[:, ROW_FIELDS : ROW_FIELDS + count]
    at = mx.arange(count * PAGE_SIZE)[None]
    is_token = (at < length) & ((at < head_tokens) | (at >= first_token))
    is_seen = is_token
    if attention.window is not None:
        is_seen = is_token & (at >= length - attention.window)
    keys, values = _in_slabs(pages, tables, entries, _in_slab, PAGE_SIZE)
    is_token, is_seen = is_token[:, None, :, None], is_seen[:, None, None]
    return mx.where(is_token, keys, 0), mx.where(is_token, values, 0), is_seen


def _is_chosen(
    pages: LayerMemory, queries: mx.array, metadata: AttentionMetadata, attention: Attention
) -> mx.array:
    """Which tokens of the pages that `_read` reads a query head chooses, [B, q_heads, 1, T]."""
    assert attention.read_tokens is not None
    tables = tables_of(metadata, pages.slab_stride)
    length, entries = tables.array[:, 0], tables.array[:, ROW_FIELDS:]
    entries = entries[:, : tables.reach // PAGE_SIZE]
    (summaries,) = _in_slabs(pages, tables, entries, _summaries_in_slab, RUNS_OF_PAGE)
    scores = run_scores(queries, summaries, attention.scale)
    runs = chosen_runs(scores, length, attention.read_tokens)
    none = mx.zeros((*runs.shape[:2], tables.reach // RUN_TOKENS), mx.bool_)
    is_chosen = mx.put_along_axis(none, runs, mx.array(True), axis=-1)
    is_chosen = is_chosen | (length <= attention.read_tokens)[:, None, None]
    of_tokens = mx.repeat(is_chosen, RUN_TOKENS, axis=-1)[:, :, None]
    return mx.repeat(of_tokens, queries.shape[1] // runs.shape[1], axis=1)


Read = Callable[[Slab, mx.array], tuple[mx.array, ...]]


def _in_slabs(
    pages: LayerMemory, tables: Tables, entries: mx.array, read: Read, of_page: int
) -> tuple[mx.array, ...]:
    """What `read` finds in whole pages, [B, heads, pages * of_page, dim], of whichever slab each is
    in."""
    found: tuple[mx.array, ...] | None = None
    slab_of_entry, page = entries // pages.slab_stride, entries % pages.slab_stride
    for at, number in enumerate(tables.slabs):
        is_here = slab_of_entry == at
        here = read(pages.slabs[number], mx.where(is_here, page, 0))
        choose = _chooser(mx.repeat(is_here, of_page, axis=1)[:, None, :, None])
        found = here if found is None else tuple(map(choose, here, found))
    assert found is not None, "a sequence has pages"
    return found


def _chooser(condition: mx.array) -> Callable[[mx.array, mx.array], mx.array]:
    return lambda here, other: mx.where(condition, here, other)


def _in_slab(slab: Slab, page: mx.array) -> tuple[mx.array, mx.array]:
    """Keys and values [B, heads, pages * 256, dim] of a slab's pages, int32 [B, pages]."""
    planes = [_by_head(plane[page]) for plane in slab.planes]
    return slab.layout.page_format.decode(slab.layout.geometry, planes)


def _summaries_in_slab(slab: Slab, page: mx.array) -> tuple[mx.array]:
    """The same for summaries, float16 [B, heads, pages * 8, 2 * dim]."""
    plane = slab.layout.summaries
    assert plane is not None
    view = slab.view(plane, slab.layout.summaries_at)
    return (_by_head(view[page]).view(mx.float16),)


def _by_head(words: mx.array) -> mx.array:
    """[B, heads, pages * slots, slot_words] of words [B, pages, heads, slots, slot_words]."""
    return mx.flatten(words.swapaxes(1, 2), 2, 3)
