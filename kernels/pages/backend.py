"""Reads and writes pages with plain MLX operations: the portable backend, the reference that faster
ones are tested against, and what these inherit where they have no kernel.

Only the backend decides how a write reaches a slab, and what later reads must wait for. So no other
code touches page memory.

MLX arrays are values. A plain write replaces a slab by the result of a scatter, which MLX computes
in the slab's own memory if nothing else refers to it. A read in flight does refer to it, and the
write would copy the whole slab. So a write first waits for the stream to be idle. Writes are
computed at once, because sequences of all threads share a slab: see `ThreadConflict`.
"""

from collections.abc import Hashable, Iterator, Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.choice import chooses, chosen_runs, chosen_tokens, run_scores
from paged_kv.kernels.pages.dense_attention import attend_by_sequence, attend_to
from paged_kv.kernels.pages.gather import (
    ReadSlab,
    find_places,
    gather,
    gather_tokens,
    read_places,
    read_sequence,
    read_slab,
    read_summaries,
)
from paged_kv.kernels.pages.layer_memory import LayerMemory, Slab
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
from paged_kv.kernels.pages.verdicts import Verdicts

Integers = npt.NDArray[np.int64]


class Backend:
    """Operations on the pages of one layer. B sequences (rows), S new tokens, T tokens in all.

    Attributes:
        name: that PAGED_KV_BACKEND chooses it by.
        fallbacks: how often plain operations stood in for a kernel.
        slab_padding: bytes that `new_slab` allocates beyond those of the pages.
        sums_apart: whether attention sums the tokens of each row in the same order whatever other
            rows there are; not where keys are padded, or cut into parts, by the longest row.
        writes_in_place: whether a lazy read that is computed after a write shows the written
            contents.
        verdicts: on the backend's kernels, which are checked before they are used; None if they are
            used unchecked.
    """

    name = "plain"
    fallbacks = 0
    slab_padding = 0
    sums_apart = False
    writes_in_place = False
    verdicts: Verdicts | None = None

    @property
    def variant(self) -> str:
        """The name, and what the kernels are chosen by besides, such as "native (avx2)"."""
        return self.name

    @property
    def build(self) -> str:
        """A digest of the kernels: other ones may be wrong, or round otherwise."""
        return ""

    @property
    def is_disabled(self) -> bool:
        """Whether no kernel is used any more, because one is wrong."""
        return self.verdicts is not None and self.verdicts.failure is not None

    @property
    def kept_bytes(self) -> int:
        """Bytes of arrays that the backend keeps for later calls."""
        return 0

    @property
    def recorder(self) -> "StepRecorder | None":
        """None if MLX cannot record the operations, because they are none of its graph."""
        return StepRecorder()

    def supports(self, geometry: LayerGeometry) -> bool:
        """Whether the other operations work on such a layer's pages of any format."""
        return True

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        """Memory for `pages` pages, uint16 [pages * page_units, unit_words].

        Raises:
            MemoryError: the machine has too little memory.
        """
        return untouched((pages * page_units, unit_words))

    def begin(self, *arrays: mx.array) -> None:
        """Start computing arrays that a later write of any thread waits for, if that helps: not
        where a write waits until the stream is idle, or is computed with the rest of a step."""

    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        """Write the valid tokens of a step, keys [B, k_heads, S, k_dim] and values [B, v_heads, S,
        v_dim], as the last tokens of each sequence. Their pages must have 16 bits: `copy` recodes
        those that are full. If pages have summaries, make those of pages that are full now."""
        count = keys.shape[2]
        pages.require_writable(metadata, count)
        # First, so that keys that cannot be computed stay out of the slabs, which others share.
        mx.eval(keys, values)
        mx.synchronize()
        tokens, slabs, page_ids, slots = _step_places(metadata, count, pages.slab_stride)
        by_token = [mx.flatten(each.swapaxes(1, 2), 0, 1)[:, :, None] for each in (keys, values)]
        numbers = sorted(set(slabs.tolist()))  # np.unique imports for 100 ms
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
                summarise(pages, entry)
        mx.eval([pages.slabs[number].memory for number in numbers])

    def load(self, pages: LayerMemory, contents: Mapping[int, mx.array]) -> None:
        """Fill whole pages (entry: uint16 [page_units, unit_words])."""
        mx.synchronize()
        for entry, content in contents.items():
            slab, page = divmod(entry, pages.slab_stride)
            units = pages.slabs[slab].layout.page_units
            pages.slabs[slab].memory[page * units : (page + 1) * units] = content
        mx.eval([pages.slabs[entry // pages.slab_stride].memory for entry in contents])

    def copy(self, pages: LayerMemory, copies: Mapping[int, int]) -> None:
        """Copy whole pages (from entry, to entry), recoding where the formats differ. No entry is
        both."""
        contents = {}
        for source, target in copies.items():
            # Copy and evaluate first: with a view of the slab, the write would copy all of it.
            page = pages.view(source) + 0
            contents[target] = pages.layout_of(source).recoded(page, pages.layout_of(target))
            mx.eval(contents[target])
        self.load(pages, contents)

    def gather(
        self, pages: LayerMemory, metadata: AttentionMetadata, unwritten: Unwritten | None
    ) -> tuple[mx.array, mx.array]:
        """Keys [B, k_heads, T, k_dim] and values [B, v_heads, T, v_dim]. T is the longest context
        with its right padding. Sequences are aligned to end at T, and padding is zeros. Lazy."""
        return gather(pages, metadata, unwritten)

    def gather_tokens(
        self, pages: LayerMemory, metadata: AttentionMetadata, indices: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Keys [B, k_heads, K, k_dim] and values [B, v_heads, K, v_dim] of the tokens at indices
        uint32 [B, K], below T, of what `gather` returns. Lazy, but for the indices. Not for
        windows."""
        return gather_tokens(pages, metadata, indices)

    def synchronize(self, pages: LayerMemory) -> None:
        """Wait until all pending operations on the pages are done, so that other code may read
        them: of plain ones none is pending."""

    def forget_pending(self, pages: LayerMemory) -> None:
        """Let later operations on the pages not wait for those that MLX has not computed: these
        belong to steps that were undone, and there is no memory for them."""

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
        """Attention of a step of queries [B, q_heads, S, k_dim] to all tokens of their sequences.
        Returns [B, q_heads, S, v_dim], finite where the step is padding.

        With `read_tokens`, a step of one token reads what `choice` chooses, unless a window or
        unwritten tokens are given, or no sequence has more tokens.

        `unwritten` are unwritten keys [B, k_heads, N, k_dim] and values [B, v_heads, N, v_dim]:
        the last tokens of each sequence, counted in its length. A `step` is such keys and values
        that are written too, see `write`: at a lower cost than by a call of its own.

        With position queries [B, q_heads, S, v_dim] it is latent attention (MLA): keys are latents
        [B, 1, T, k_dim], values are position keys [B, 1, T, v_dim], and all heads share both.
        Scores are scale * queries @ latents + position_queries @ position_keys. The output, [B,
        q_heads, S, k_dim], is the sum of latents, weighted by their softmax. All tokens are read,
        and there are neither sinks nor a softcap.
        """
        if step is not None:
            self.write(pages, *step, metadata)
        is_exact = unwritten is not None or position_queries is not None
        most = None if is_exact or queries.shape[2] > 1 else attention.read_tokens

        def read(row: int) -> tuple[mx.array, mx.array]:
            keys, values = read_sequence(pages, metadata, row, unwritten)
            if most is None or attention.window is not None or keys.shape[2] <= most:
                return keys, values
            entries = metadata.sequences[row].block_table_array[:, : -(-keys.shape[2] // PAGE_SIZE)]
            (found,) = read_places(pages, find_places(entries, pages.slab_stride), read_summaries)
            own, summaries = queries[row : row + 1], mx.flatten(found, 2, 3)
            return chosen_tokens(own, keys, values, summaries, attention)

        v_dim = pages.geometry.v_dim
        return attend_by_sequence(read, queries, metadata, v_dim, attention, position_queries)


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


def summarise(pages: LayerMemory, entry: int) -> None:
    """Write the summaries of a full page of 16 bits."""
    slab, layout = pages.slabs[entry // pages.slab_stride], pages.layout_of(entry)
    words = summaries_of(layout.numbers(pages.view(entry))[0]).view(WORD)
    lines = words.reshape(-1, layout.unit_words)
    end = (entry % pages.slab_stride + 1) * layout.page_units
    slab.memory[end - lines.shape[0] : end] = lines


class StepRecorder:
    """Lets `mx.compile` record what a backend does in a step of one token per sequence: see
    paged_kv/steps/recorded.py.

    A recording holds no number that changes from step to step. It takes these as arrays, for each
    layer those of `arrays`, and returns the layer's `changed` ones. Plain operations then read all
    pages that the tables have room for, and hide what is no token.

    Attributes:
        pays: whether recorded steps may be quicker, which the first ones show.
    """

    pays = False

    @property
    def backend(self) -> Backend:
        """The operations on the pages of `set_arrays`."""
        return _RecordedOperations()

    def key(self, pages: LayerMemory, tables: Tables) -> Hashable:
        """All that operations on a layer depend on besides its arrays. Equal keys have arrays of
        equal shapes and dtypes."""
        slabs = [pages.slabs[number] for number in tables.slabs]
        return tuple((slab.memory.shape, slab.layout) for slab in slabs)

    def arrays(self, pages: LayerMemory, tables: Tables) -> list[mx.array]:
        """The arrays of a layer that a step reads, writes or waits for.

        Raises:
            ThreadConflict: another thread has yet to compute them.
        """
        return [pages.slabs[number].memory for number in tables.slabs]

    def set_arrays(
        self, placeholder: LayerMemory, pages: LayerMemory, tables: Tables, arrays: list[mx.array]
    ) -> None:
        """Let pages without slabs be like a layer's, with other arrays in the place of its own."""
        for number, memory in zip(tables.slabs, arrays, strict=True):
            placeholder.slabs[number] = Slab(memory, pages.slabs[number].layout)

    def changes(self, tables: Tables) -> int:
        """How many arrays `changed` returns."""
        return len(tables.slabs)

    def changed(self, placeholder: LayerMemory, tables: Tables) -> list[mx.array]:
        """The arrays of a placeholder that its operations have replaced."""
        return self.arrays(placeholder, tables)

    def keep(
        self, pages: LayerMemory, tables: Tables, changed: list[mx.array], filled: list[int]
    ) -> None:
        """Let a layer have these arrays, after a recorded step that has filled the pages of these
        table entries: summarise them, if pages have summaries. A recording does not know them."""
        for number, memory in zip(tables.slabs, changed, strict=True):
            pages.slabs[number].memory = memory
        if pages.geometry.has_summaries:
            for entry in filled:
                summarise(pages, entry)
        mx.eval(self.arrays(pages, tables))  # as every write of plain operations


class _RecordedOperations(Backend):
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
