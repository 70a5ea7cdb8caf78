"""Reads and writes pages with plain MLX operations: the portable backend, and the reference that
faster backends are tested against.

MLX arrays are values. A write replaces a slab by the result of a scatter, which MLX computes in the
slab's own memory if nothing else refers to it. A read in flight does refer to it, and the write
would copy the whole slab. So a write first waits for the stream to be idle. Writes are computed at
once, because sequences of all threads share a slab: see `ThreadConflict`.

Recorded steps find tokens by arrays instead of Python numbers: they read all pages that the tables
have room for, and hide what is no token.
"""

from collections.abc import Hashable, Iterator, Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.backend import Backend, LayerMemory, Slab, StepRecorder
from paged_kv.kernels.pages.choice import chooses, chosen_runs, chosen_tokens, run_scores
from paged_kv.kernels.pages.memory import untouched
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import (
    FP16,
    PAGE_SIZE,
    RUN_TOKENS,
    LayerGeometry,
    summaries_of,
)
from paged_kv.kernels.pages.tables import ROW_FIELDS, Tables, tables_of
from paged_kv.kernels.plain.attention import attend_by_row, attend_to
from paged_kv.kernels.plain.gather import (
    ReadSlab,
    find_places,
    gather,
    gather_tokens,
    read_places,
    read_row,
    read_slab,
    read_summaries,
)

Integers = npt.NDArray[np.int64]


class PlainBackend:
    """See `Backend` for the operations."""

    name = "plain"
    fallbacks = 0
    slab_padding = 0
    writes_in_place = False

    @property
    def recorder(self) -> StepRecorder | None:
        return PlainRecorder()

    @property
    def kept_bytes(self) -> int:
        return 0

    def supports(self, geometry: LayerGeometry) -> bool:
        return True

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        return untouched((pages * page_units, unit_words))

    def begin(self, *arrays: mx.array) -> None:
        """Does nothing: a write waits until the stream is idle in any case."""

    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        count = keys.shape[2]
        pages.require_writable(metadata, count)
        # First, so that keys that cannot be computed stay out of the slabs, which others share.
        mx.eval(keys, values)
        mx.synchronize()
        tokens, slabs, page_ids, slots = _step_places(metadata, count, pages.slab_stride)
        by_token = [mx.flatten(each.swapaxes(1, 2), 0, 1)[:, :, None] for each in (keys, values)]
        numbers = np.unique(slabs).tolist()
        for number in numbers:
            slab, here = pages.slabs[number], slabs == number
            new_keys, new_values = by_token
            if here.sum() < by_token[0].shape[0]:
                new_keys, new_values = (each[mx.array(tokens[here])] for each in by_token)
            page, slot = mx.array(page_ids[here]), mx.array(slots[here])
            for lines, words in _new_lines(slab, new_keys, new_values, page, slot):
                slab.memory[lines] = words
        if pages.geometry.has_summaries:
            for entry in metadata.filled_entries(count):
                _summarise(pages, entry)
        mx.eval([pages.slabs[number].memory for number in numbers])

    def load(self, pages: LayerMemory, contents: Mapping[int, mx.array]) -> None:
        mx.synchronize()
        for entry, content in contents.items():
            slab, page = divmod(entry, pages.slab_stride)
            units = pages.slabs[slab].layout.page_units
            pages.slabs[slab].memory[page * units : (page + 1) * units] = content
        mx.eval([pages.slabs[entry // pages.slab_stride].memory for entry in contents])

    def copy(self, pages: LayerMemory, copies: Mapping[int, int]) -> None:
        contents = {}
        for source, target in copies.items():
            # Copy and evaluate first: with a view of the slab, the write would copy all of it.
            page = pages.view(source) + 0
            contents[target] = pages.layout_of(source).recoded(page, pages.layout_of(target))
            mx.eval(contents[target])
        self.load(pages, contents)

    gather = staticmethod(gather)
    gather_tokens = staticmethod(gather_tokens)

    def synchronize(self, pages: LayerMemory) -> None:
        """Does nothing: writes are computed at once."""

    def forget_pending(self, pages: LayerMemory) -> None:
        """Does nothing: nothing is pending."""

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
        is_exact = unwritten is not None or position_queries is not None
        most = None if is_exact or queries.shape[2] > 1 else attention.read_tokens

        def read(row: int) -> tuple[mx.array, mx.array]:
            keys, values = read_row(pages, metadata, row, unwritten)
            if most is None or attention.window is not None or keys.shape[2] <= most:
                return keys, values
            entries = metadata.rows[row].block_table_array[:, : -(-keys.shape[2] // PAGE_SIZE)]
            (found,) = read_places(pages, find_places(entries, pages.slab_stride), read_summaries)
            own, summaries = queries[row : row + 1], mx.flatten(found, 2, 3)
            return chosen_tokens(own, keys, values, summaries, attention)

        v_dim = pages.geometry.v_dim
        return attend_by_row(read, queries, metadata, v_dim, attention, position_queries)


def _step_places(
    metadata: AttentionMetadata, count: int, slab_stride: int
) -> tuple[Integers, Integers, Integers, Integers]:
    """Of the valid tokens of a step, sequence by sequence: their indices among [B * count], and
    their slabs, pages and slots."""
    step = metadata.valid_tokens(count)
    tokens = np.concatenate([row * count + np.array(own, np.int64) for row, own in enumerate(step)])
    positions = np.concatenate(
        [
            np.arange(length - len(own), length)
            for own, length in zip(step, metadata.context_lens, strict=True)
        ]
    )
    entries = metadata.block_table_array[tokens // max(count, 1), positions // PAGE_SIZE]
    slabs, page_ids = np.divmod(entries.astype(np.int64), slab_stride)
    return tokens, slabs, page_ids, positions % PAGE_SIZE


def _new_lines(
    slab: Slab, keys: mx.array, values: mx.array, page_ids: mx.array, slots: mx.array
) -> Iterator[tuple[mx.array, mx.array]]:
    """Lines of a slab, and their words, for tokens [N, heads, 1, dim] at pages and slots [N]."""
    layout = slab.layout
    encoded = layout.page_format.encode(keys, values)
    for plane, offset, words in zip(layout.planes, layout.offsets, encoded, strict=True):
        if plane.words:
            units = plane.slot_words // layout.unit_words
            first = page_ids * layout.page_units + offset // layout.unit_words
            heads = mx.arange(plane.heads)[:, None] * PAGE_SIZE
            in_plane = (heads + slots[:, None, None]) * units + mx.arange(units)
            lines = (first[:, None, None] + in_plane).reshape(-1)
            yield lines, words.reshape(-1, layout.unit_words)


def _summarise(pages: LayerMemory, entry: int) -> None:
    """Write the summaries of a full page of 16 bits."""
    slab, layout = pages.slabs[entry // pages.slab_stride], pages.layout_of(entry)
    words = summaries_of(layout.numbers(pages.view(entry))[0]).view(WORD)
    lines = words.reshape(-1, layout.unit_words)
    end = (entry % pages.slab_stride + 1) * layout.page_units
    slab.memory[end - lines.shape[0] : end] = lines


class PlainRecorder:
    """See `StepRecorder` for the operations."""

    pays = False

    @property
    def backend(self) -> Backend:
        return _RecordedOperations()

    def key(self, pages: LayerMemory, tables: Tables) -> Hashable:
        slabs = [pages.slabs[number] for number in tables.slabs]
        return tuple((slab.memory.shape, slab.layout) for slab in slabs)

    def arrays(self, pages: LayerMemory, tables: Tables) -> list[mx.array]:
        return [pages.slabs[number].memory for number in tables.slabs]

    def set_arrays(
        self, placeholder: LayerMemory, pages: LayerMemory, tables: Tables, arrays: list[mx.array]
    ) -> None:
        for number, memory in zip(tables.slabs, arrays, strict=True):
            placeholder.slabs[number] = Slab(memory, pages.slabs[number].layout)

    def changes(self, tables: Tables) -> int:
        return len(tables.slabs)

    def changed(self, placeholder: LayerMemory, tables: Tables) -> list[mx.array]:
        return self.arrays(placeholder, tables)

    def keep(
        self, pages: LayerMemory, tables: Tables, changed: list[mx.array], filled: list[int]
    ) -> None:
        """Computes them, as every write of plain operations does."""
        for number, memory in zip(tables.slabs, changed, strict=True):
            pages.slabs[number].memory = memory
        if pages.geometry.has_summaries:
            for entry in filled:
                _summarise(pages, entry)
        mx.eval(self.arrays(pages, tables))


class _RecordedOperations(PlainBackend):
    """Plain operations of a step of one token per sequence, by the arrays of `Tables`. MLX cannot
    write a slab in place while its memory is shared, so a step replaces it."""

    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        tables = tables_of(metadata, pages.slab_stride)
        position, entries = tables.array[:, :1] - 1, tables.array[:, ROW_FIELDS:]
        entry = mx.take_along_axis(entries, position // PAGE_SIZE, axis=1)[:, 0]
        slot = position[:, 0] % PAGE_SIZE
        for at, number in enumerate(tables.slabs):
            slab, is_here = pages.slabs[number], entry // pages.slab_stride == at
            if slab.layout.page_format != FP16:
                continue
            page = mx.where(is_here, entry % pages.slab_stride, 0)
            for lines, words in _new_lines(slab, keys, values, page, slot):
                is_new = mx.repeat(is_here, lines.size // is_here.size)[:, None]
                # Added, so that a token of another slab changes nothing wherever it points.
                difference = mx.where(is_new, words - slab.memory[lines], 0)
                slab.memory = slab.memory.at[lines].add(difference)

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
        if position_queries is None and chooses(attention, metadata, queries.shape[2]):
            is_seen = is_seen & _is_chosen(pages, queries, metadata, attention)
        return attend_to(keys, values, queries, attention, is_seen, position_queries)


def _read(
    pages: LayerMemory, metadata: AttentionMetadata, attention: Attention
) -> tuple[mx.array, mx.array, mx.array]:
    """Keys and values [B, heads, T, dim] of all pages that the tables have room for, zeros where
    there is no token, and which of them the query sees, boolean [B, 1, 1, T]."""
    tables = tables_of(metadata, pages.slab_stride)
    length, _, head_tokens, first_token = (tables.array[:, at : at + 1] for at in range(4))
    at = mx.arange(tables.reach)[None]
    is_token = (at < length) & ((at < head_tokens) | (at >= first_token))
    is_seen = is_token
    if attention.window is not None:
        is_seen = is_token & (at >= length - attention.window)
    keys, values = _in_slabs(pages, tables, read_slab)
    is_token, is_seen = is_token[:, None, :, None], is_seen[:, None, None]
    return mx.where(is_token, keys, 0), mx.where(is_token, values, 0), is_seen


def _is_chosen(
    pages: LayerMemory, queries: mx.array, metadata: AttentionMetadata, attention: Attention
) -> mx.array:
    """Which tokens of the pages that `_read` reads a query head chooses, [B, q_heads, 1, T]."""
    assert attention.read_tokens is not None
    tables = tables_of(metadata, pages.slab_stride)
    length = tables.array[:, 0]
    (summaries,) = _in_slabs(pages, tables, read_summaries)
    scores = run_scores(queries, summaries, attention.scale)
    runs = chosen_runs(scores, length, attention.read_tokens)
    none = mx.zeros((*runs.shape[:2], tables.reach // RUN_TOKENS), mx.bool_)
    is_chosen = mx.put_along_axis(none, runs, mx.array(True), axis=-1)
    is_chosen = is_chosen | (length <= attention.read_tokens)[:, None, None]
    of_tokens = mx.repeat(is_chosen, RUN_TOKENS, axis=-1)[:, :, None]
    return mx.repeat(of_tokens, queries.shape[1] // runs.shape[1], axis=1)


def _in_slabs(pages: LayerMemory, tables: Tables, read: ReadSlab) -> tuple[mx.array, ...]:
    """What `read` finds in the pages of the tables, of whichever slab each is in, one behind the
    other: [B, heads, T or runs, dim]."""
    entries = tables.array[:, None, ROW_FIELDS : ROW_FIELDS + tables.reach // PAGE_SIZE]
    slab_of_entry, page = entries // pages.slab_stride, entries % pages.slab_stride
    found: tuple[mx.array, ...] = ()
    for at, number in enumerate(tables.slabs):
        is_here = slab_of_entry == at
        here = read(pages.slabs[number], mx.where(is_here, page, 0), None)
        if found:
            is_page = is_here[..., None, None]
            pairs = zip(here, found, strict=True)
            here = tuple([mx.where(is_page, new, other) for new, other in pairs])
        found = here
    return tuple([mx.flatten(each, 2, 3) for each in found])
