"""Reads and writes pages with plain MLX operations: the portable backend, and the reference that
faster backends are tested against.

MLX arrays are values. A write replaces a slab by the result of a scatter, which MLX computes in the
slab's own memory if nothing else refers to it. A read in flight does refer to it, and the write
would copy the whole slab. So a write first waits for the stream to be idle. Writes are computed at
once, because sequences of all threads share a slab: see `ThreadConflict`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.choice import chooses, chosen_tokens
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_memory import LayerMemory, Slab
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import PAGE_SIZE, Plane
from paged_kv.kernels.pages.summaries import summaries_of
from paged_kv.kernels.pages.untouched_memory import untouched
from paged_kv.kernels.plain import row_attention
from paged_kv.kernels.plain.page_gather import gather, read_row
from paged_kv.kernels.plain.token_gather import gather_tokens

Indices = npt.NDArray[np.int64]


class PlainBackend:
    """See `Backend` for the operations."""

    name = "plain"
    fallbacks = 0
    slab_padding = kept_bytes = 0
    writes_in_place = False

    def supports(self, geometry: LayerGeometry) -> bool:
        return True

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        return untouched((pages * page_units, unit_words))

    def begin(self, *arrays: mx.array) -> None:
        """Does nothing: a write waits until the stream is idle in any case."""

    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        pages.require_writable(metadata, keys.shape[2])
        # First, so that keys that cannot be computed stay out of the slabs, which others share.
        mx.eval(keys, values)
        mx.synchronize()
        step = metadata.valid_tokens(keys.shape[2])
        slabs, page_ids, slots = _places(metadata, step, pages.slab_stride)
        tokens = _step_indices(step, keys.shape[2])
        written = [pages.slabs[int(slab)] for slab in np.unique(slabs)]
        for slab, number in zip(written, np.unique(slabs), strict=True):
            mine = np.flatnonzero(slabs == number)
            chosen = None if len(mine) == math.prod(keys.shape[::2]) else mx.array(tokens[mine])
            _write_slots(slab, keys, values, chosen, page_ids[mine], slots[mine])
        if pages.geometry.has_summaries:
            for entry in metadata.filled_entries(keys.shape[2]):
                summarise(pages, entry)
        mx.eval([slab.memory for slab in written])

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

        def read(row: int) -> tuple[mx.array, mx.array]:
            return read_row(pages, metadata, row, unwritten)

        is_latent = position_queries is not None
        if not is_latent and unwritten is None and chooses(attention, metadata, queries.shape[2]):
            return self._attend_chosen(pages, queries, metadata, attention)
        v_dim = pages.geometry.v_dim
        return row_attention.attend(read, queries, metadata, v_dim, attention, position_queries)

    def _attend_chosen(
        self,
        pages: LayerMemory,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
    ) -> mx.array:
        """Attention to chosen tokens. Sequences that may be read whole are, as without a choice."""

        def read(row: int) -> tuple[mx.array, mx.array]:
            keys, values = read_row(pages, metadata, row, None)
            if keys.shape[2] <= (attention.read_tokens or 0):
                return keys, values
            summaries = _summaries(pages, metadata.block_tables[row], metadata.context_lens[row])
            return chosen_tokens(queries[row : row + 1], keys, values, summaries, attention)

        return row_attention.attend(
            read, queries, metadata, pages.geometry.v_dim, replace(attention, read_tokens=None)
        )


def _write_slots(
    slab: Slab,
    keys: mx.array,
    values: mx.array,
    tokens: mx.array | None,
    page_ids: Indices,
    slots: Indices,
) -> None:
    """Write tokens of a step to pages and slots of a slab. `tokens` are indices into [B * S]; None
    means all."""
    layout = slab.layout
    encoded = layout.page_format.encode(keys, values)
    for plane, offset, words in zip(layout.planes, layout.offsets, encoded, strict=True):
        if not plane.words:
            continue
        first = mx.array(page_ids * layout.page_units + offset // layout.unit_words)
        lines = slot_lines(first, mx.array(slots), plane, layout.unit_words)
        by_token = mx.flatten(words.transpose(0, 2, 1, 3), 0, 1)
        chosen = by_token if tokens is None else by_token[tokens]
        slab.memory[lines] = chosen.reshape(-1, layout.unit_words)


def summarise(pages: LayerMemory, entry: int) -> None:
    """Write the summaries of a full page of 16 bits."""
    slab, layout = pages.slabs[entry // pages.slab_stride], pages.layout_of(entry)
    words = summaries_of(layout.numbers(pages.view(entry))[0]).view(WORD)
    lines = words.reshape(-1, layout.unit_words)
    end = (entry % pages.slab_stride + 1) * layout.page_units
    slab.memory[end - lines.shape[0] : end] = lines


def _summaries(pages: LayerMemory, table: tuple[int, ...], context_len: int) -> mx.array:
    """The summaries of a sequence's pages, float16 [1, k_heads, pages * 8, 2 * k_dim]. Those of a
    page that is not full say nothing."""
    planes = []
    for entry in table[: -(-context_len // PAGE_SIZE)]:
        layout = pages.layout_of(entry)
        plane = layout.summaries
        assert plane is not None
        words = pages.view(entry).reshape(-1)[layout.summaries_at :]
        planes.append(words.reshape(1, plane.heads, plane.slots, plane.slot_words))
    return mx.concatenate(planes, axis=2).view(mx.float16)


def _places(
    metadata: AttentionMetadata, step: list[range], slab_stride: int
) -> tuple[Indices, Indices, Indices]:
    """Slab, page and slot of each valid token of a step, sequence by sequence."""
    entries, positions = [], []
    for table, context_len, own in zip(
        metadata.block_tables, metadata.context_lens, step, strict=True
    ):
        at = np.arange(context_len - len(own), context_len)
        first = (context_len - len(own)) // PAGE_SIZE
        entries.append(np.array(table[first:], dtype=np.int64)[at // PAGE_SIZE - first])
        positions.append(at)
    slabs, page_ids = np.divmod(np.concatenate(entries), slab_stride)
    return slabs, page_ids, np.concatenate(positions) % PAGE_SIZE


def _step_indices(step: list[range], count: int) -> Indices:
    """The same tokens as indices into [B * S]."""
    return np.concatenate([row * count + np.array(own, int) for row, own in enumerate(step)])


def slot_lines(first: mx.array, slots: mx.array, plane: Plane, unit_words: int) -> mx.array:
    """Lines of a slab, [tokens * heads * units], of slots whose plane begins at line `first`."""
    units = plane.slot_words // unit_words
    heads = mx.arange(plane.heads)[None, :, None] * PAGE_SIZE
    in_plane = (heads + slots[:, None, None]) * units + mx.arange(units)
    return (first[:, None, None] + in_plane).reshape(-1)
