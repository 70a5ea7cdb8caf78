"""Reads and writes pages with the compiled CPU kernels, which write in place.

Only gathers are lazy. Every other call first computes its inputs, and has written the pages or the
output when it returns.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from paged_kv.kernels.cpu.native_library import (
    LayoutStruct,
    MetadataStruct,
    NativeLibrary,
    OptionsStruct,
    PagesStruct,
    Tensor,
)
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.memory import require_memory, untouched
from paged_kv.kernels.pages.number_format import FLOATS, WORD
from paged_kv.kernels.pages.page_format import LayerGeometry, PageLayout
from paged_kv.kernels.pages.verdicts import digest_of

HEAD_SIZES = range(8, 577, 8)
ALIGNMENT = 64

# The key of the library's structs in the `memo` of layers and batches.
STRUCT = "native"

# Up to this many bytes, copying zeros is faster than computing them, which goes through MLX's
# scheduler: 2 microseconds against 23 for 8 KiB, and equal at 64 KiB. Zeros are kept for steps of
# one token only: prompts have too many lengths.
COPIED_BYTES = 1 << 16


class NativeBackend(Backend):
    """See `Backend` for the operations. Gathers are plain operations."""

    name = "native"
    sums_apart = True
    writes_in_place = True
    slab_padding = ALIGNMENT
    recorder = None

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self._zeros: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}

    @property
    def variant(self) -> str:
        return f"{self.name} ({self.library.instruction_set})"

    @property
    def build(self) -> str:
        # The sources too: a library that was not built again does not fit their structs.
        return digest_of(self.library.path, Path(__file__).parent)

    @property
    def kept_bytes(self) -> int:
        # Another thread may add one.
        return sum(zeros.nbytes for zeros in list(self._zeros.values()))

    def supports(self, geometry: LayerGeometry) -> bool:
        return (
            geometry.k_heads == geometry.v_heads
            and geometry.k_dim in HEAD_SIZES
            and geometry.v_dim in HEAD_SIZES
            and {geometry.k_dtype, geometry.v_dtype} <= FLOATS.keys()
        )

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        count = pages * page_units * unit_words
        spare = ALIGNMENT // WORD.size
        require_memory((count + spare) * WORD.size)
        memory = untouched((1, count + spare)).reshape(-1)
        mx.eval(memory)
        # One address translation then covers 2 MiB: decode at 32K takes 0.83 to 0.95 of the time.
        self.library.ask_for_huge_pages(_address(memory), memory.nbytes)
        first = -_address(memory) % ALIGNMENT // WORD.size
        slab = memory[first : first + count].reshape(pages * page_units, unit_words)
        mx.eval(slab)
        return slab

    def begin(self, *arrays: mx.array) -> None:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types

    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        mx.eval(keys, values)
        self.library.write(_pages_struct(pages), _metadata_struct(metadata), keys, values)

    def load(self, pages: LayerMemory, contents: Mapping[int, mx.array]) -> None:
        whole = {entry: mx.contiguous(content) for entry, content in contents.items()}
        mx.eval(whole)
        for entry, content in whole.items():
            self.library.load(_pages_struct(pages), entry, content)

    def copy(self, pages: LayerMemory, copies: Mapping[int, int]) -> None:
        self.library.copy(_pages_struct(pages), list(copies), list(copies.values()))

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
        """See `Backend.attend`. Waits for MLX once, with a step too."""
        waited_for, dim = [queries, *(step or ())], pages.geometry.v_dim
        if position_queries is not None:
            waited_for.append(position_queries)
            dim = queries.shape[3]
        others: list[mx.array] = []
        if unwritten is not None:
            others = [mx.contiguous(unwritten[0]), mx.contiguous(unwritten[1])]
        if attention.sinks is not None:
            others.append(attention.sinks)
        shape = (*queries.shape[:3], dim)
        zeros = self._zeros.get((shape, queries.dtype))  # Not a call in each layer.
        if zeros is None:
            output = self._new_array(shape, queries.dtype)
        else:
            output = mx.from_dlpack(zeros, copy=True)
        page_struct = pages.memo.get(STRUCT) or _pages_struct(pages)
        metadata_struct = (
            metadata.memo[STRUCT][0] if STRUCT in metadata.memo else _metadata_struct(metadata)
        )
        mx.eval(*waited_for, *others)
        if step is not None:
            self.library.write(page_struct, metadata_struct, *step)
        options = OptionsStruct(
            scale=attention.scale,
            causal=attention.causal,
            window=attention.window or 0,
            softcap=attention.softcap or 0,
            read_tokens=attention.read_tokens or 0,
        )
        # The struct holds addresses only: the tensors must live until the call is over.
        tensors = [Tensor(each) for each in others] if others else []
        if unwritten is not None:
            options.new_k, options.new_v = tensors[0].address, tensors[1].address
        if attention.sinks is not None:
            options.sinks = tensors[-1].address
        self.library.attend(
            page_struct, metadata_struct, queries, position_queries, output, options
        )
        return output

    def _new_array(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """An array of zeros with memory of its own, which the library may write."""
        if shape[2] > 1 or math.prod(shape) * dtype.size > COPIED_BYTES:
            array = mx.zeros(shape, dtype=dtype)
            mx.eval(array)
            return array
        zeros = self._zeros.get((shape, dtype))
        if zeros is None:
            if len(self._zeros) >= 64:
                self._zeros.clear()
            zeros = mx.zeros(shape, dtype=dtype)
            mx.eval(zeros)
            self._zeros[shape, dtype] = zeros
        return mx.from_dlpack(zeros, copy=True)


def _address(array: mx.array) -> int:
    return int(np.asarray(array).ctypes.data)


def _pages_struct(pages: LayerMemory) -> PagesStruct:
    """Made again when the layer's slabs have changed."""
    if STRUCT in pages.memo:
        kept: PagesStruct = pages.memo[STRUCT]
        return kept
    geometry, count = pages.geometry, max(pages.slabs, default=0) + 1
    slabs, slab_layouts = (ctypes.c_void_p * count)(), (ctypes.c_int32 * count)()
    layouts = list({slab.layout: None for slab in pages.slabs.values()})
    for number, slab in pages.slabs.items():
        slabs[number] = _address(slab.memory)
        slab_layouts[number] = layouts.index(slab.layout)
    struct = pages.memo[STRUCT] = PagesStruct(
        slabs=slabs,
        slab_layouts=slab_layouts,
        layouts=(LayoutStruct * len(layouts))(*map(_layout_struct, layouts)),
        slab_stride=pages.slab_stride,
        kv_heads=geometry.k_heads,
        k_dim=geometry.k_dim,
        v_dim=geometry.v_dim,
        k_dtype=FLOATS[geometry.k_dtype].cpu,
        v_dtype=FLOATS[geometry.v_dtype].cpu,
    )
    return struct


def _layout_struct(layout: PageLayout) -> LayoutStruct:
    keys, values, geometry = layout.page_format.keys, layout.page_format.values, layout.geometry
    begins = {name: at * WORD.size for name, at in layout.begins._asdict().items()}
    return LayoutStruct(
        page_bytes=layout.page_bytes,
        **begins,
        summaries=layout.summaries_at * WORD.size if layout.summaries else 0,
        k_format=keys.encoding(geometry.k_dtype).cpu,
        v_format=values.encoding(geometry.v_dtype).cpu,
    )


def _metadata_struct(metadata: AttentionMetadata) -> MetadataStruct:
    """Made once for all layers that read the same batch."""
    if STRUCT in metadata.memo:
        kept: MetadataStruct = metadata.memo[STRUCT][0]
        return kept
    tables = metadata.block_table_array
    context_lens = np.array(metadata.context_lens, np.int32)
    right_padding = np.array(metadata.right_padding, np.int32)
    struct = MetadataStruct(
        block_tables=tables.ctypes.data,
        context_lens=context_lens.ctypes.data,
        right_padding=right_padding.ctypes.data,
        batch=len(metadata.context_lens),
        table_stride=tables.shape[1],
    )
    shared = metadata.shared_pages
    if shared is not None:
        struct.row_order = shared.order.ctypes.data
        struct.shared_pages = shared.shared.ctypes.data
    # Keeps the arrays alive: the struct points to them.
    metadata.memo[STRUCT] = struct, context_lens, right_padding
    return struct
