"""Pages that GPU kernels write and read on this CPU, with the expected results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import (
    PAGE_SIZE,
    FormatName,
    LayerGeometry,
    page_format_named,
)
from tests.support.arrays import normal, numbers
from tests.support.dense_attention import Numbers, dense_attention
from tests.support.gpu_on_cpu.emulated import Device
from tests.support.gpu_on_cpu.launch import Mode
from tests.support.gpu_on_cpu.toolchain import why_not
from tests.support.page_numbers import holding, numbers_in


def rarely(*values: Any) -> Any:
    """The values of parameters of a case that is left to the soak."""
    return pytest.param(*values, marks=pytest.mark.soak)


needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")

DIALECTS = ["metal", "cuda"]
# One kernel reads them all.
MIXED: list[FormatName] = ["fp16", "q4", ("q8", "fp16")]
# Threadgroup memory of an Apple GPU, and static shared memory of an NVIDIA GPU.
SHARED = {"metal": 32 << 10, "cuda": 48 << 10}
STRIDE = 8
SLAB_PAGES = 8
# Largest difference from float64. The kernels add in float32; MLX rounds outputs to the dtype, and
# prefill also rounds keys, values and, on CUDA, weights.
TOLERANCES = {mx.float16: 4e-3, mx.bfloat16: 2e-2}


def device_of(dialect: str, *orders: str, checked: bool = True) -> Device:
    """A device that runs kernels in each of the orders, "forward" by default."""
    shared = SHARED[dialect]
    names = orders or ("forward",)
    return Device([Mode(checked, order, seed=1, shared_limit=shared) for order in names])


def backend_on(device: Device, dialect: str) -> GpuBackend:
    maker = {"metal": device.metal_kernel, "cuda": device.cuda_kernel}[dialect]
    return GpuBackend(dialect, maker)


def same(
    dim: int, dtype: mx.Dtype = mx.float16, *, heads: int = 2, v_dim: int = 0
) -> LayerGeometry:
    return LayerGeometry(heads, dim, dtype, heads, v_dim or dim, dtype)


def new_pages(backend: Any, geometry: LayerGeometry, formats: Sequence[FormatName]) -> LayerPages:
    """A slab of each format with all bits set: codes, scales and floats of NaN."""
    pages = LayerPages(geometry, backend, STRIDE)
    for slab, name in enumerate(formats):
        _map_slab(pages, slab, name)
    return pages


def _map_slab(pages: LayerPages, slab: int, name: FormatName) -> None:
    pages.map_slab(slab, SLAB_PAGES, page_format_named(name))
    memory = pages.slabs[slab].memory
    pages.slabs[slab].memory = mx.contiguous(mx.full(memory.shape, 0xFFFF, dtype=WORD))
    mx.eval(pages.slabs[slab].memory)


def tables_for(pages: LayerPages, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Pages for sequences of those lengths, from all slabs in turn."""
    entries = iter([slab * STRIDE + page for page in range(SLAB_PAGES) for slab in pages.slabs])
    return tuple(tuple(next(entries) for _ in range(-(-n // PAGE_SIZE))) for n in lengths)


@dataclass
class Separately:
    """Writes a step, and then attends."""

    backend: GpuBackend

    def attend(
        self,
        pages: LayerPages,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        *,
        step: Unwritten,
    ) -> mx.array:
        self.backend.write(pages, *step, metadata)
        return self.backend.attend(pages, queries, metadata, attention)


@dataclass
class Batch:
    """Pages that hold numbers."""

    pages: LayerPages
    metadata: AttentionMetadata

    def attend(
        self, queries: int, *, gqa_group_size: int = 3, new_tokens: int = 0, **options: Any
    ) -> float:
        """The largest difference from dense attention in float64, without padding."""
        step = self._step(new_tokens) if new_tokens else None
        lengths = tuple(length + new_tokens for length in self.metadata.context_lens)
        metadata = AttentionMetadata(
            self.metadata.block_tables, lengths, self.metadata.right_padding
        )
        asked, options = self._asked(queries, gqa_group_size, options)
        found = self.pages.attend(asked, metadata, Attention(**options), unwritten=step)
        return self._error(found, asked, metadata, step, options)

    def write_and_attend(
        self, backend: GpuBackend | Separately, *, gqa_group_size: int = 3, **options: Any
    ) -> float:
        """The largest difference of a step of one token per sequence, which the same launch
        writes."""
        lengths = tuple(length + 1 for length in self.metadata.context_lens)
        self.metadata = AttentionMetadata(
            self.metadata.block_tables, lengths, self.metadata.right_padding
        )
        asked, options = self._asked(1, gqa_group_size, options)
        found = backend.attend(
            self.pages, asked, self.metadata, Attention(**options), step=self._step(1)
        )
        return self._error(found, asked, self.metadata, None, options)

    def _step(self, tokens: int) -> tuple[mx.array, mx.array]:
        """In the layout of models: the heads of a token lie side by side."""
        geometry, batch = self.pages.geometry, len(self.metadata.context_lens)
        heads, dtype = geometry.k_heads, geometry.k_dtype
        keys = normal((batch, tokens, heads, geometry.k_dim), dtype, seed=3).transpose(0, 2, 1, 3)
        return off_centre(keys), normal((batch, heads, tokens, geometry.v_dim), dtype, seed=4)

    def _asked(
        self, queries: int, gqa_group_size: int, options: dict[str, Any]
    ) -> tuple[mx.array, dict[str, Any]]:
        """Queries, and all options of attention."""
        geometry, batch = self.pages.geometry, len(self.metadata.context_lens)
        heads, dtype = gqa_group_size * geometry.k_heads, geometry.k_dtype
        sinks = 2 * normal((heads,), dtype, seed=2) if options.pop("with_sinks", False) else None
        asked = normal((batch, heads, queries, geometry.k_dim), dtype, seed=1)
        usual = {"scale": geometry.k_dim**-0.5, "causal": True, "window": None, "sinks": sinks}
        return asked, usual | options

    def attend_latent(self, heads: int, queries: int = 1, **options: Any) -> float:
        """The largest difference from dense attention in float64 to latents with position keys
        behind them, without padding."""
        geometry, metadata = self.pages.geometry, self.metadata
        options = {"scale": geometry.k_dim**-0.5, "causal": True, "window": None} | options
        rows, dtype = len(metadata.context_lens), geometry.k_dtype
        asked = normal((rows, heads, queries, geometry.k_dim), dtype, seed=1)
        positions = normal((rows, heads, queries, geometry.v_dim), dtype, seed=2) * 0.1
        found = self.pages.attend(asked, metadata, Attention(**options), None, positions)
        assert np.isfinite(numbers(found)).all()
        worst, scale = 0.0, options.pop("scale")
        for row, own in enumerate(metadata.valid_tokens(queries)):
            if not own:
                continue
            valid = slice(own.start, own.stop)
            held, keys = self._numbers_of(row, None, metadata)
            expected = dense_attention(
                np.concatenate([scale * numbers(asked[row]), numbers(positions[row])], -1)[
                    :, valid
                ],
                np.concatenate([held, keys], -1),
                held,
                scale=1.0,
                sinks=None,
                **options,
            )
            worst = max(worst, np.abs(numbers(found[row, :, valid]) - expected).max())
        return worst

    def _error(
        self,
        found: mx.array,
        asked: mx.array,
        metadata: AttentionMetadata,
        step: Any,
        options: dict[str, Any],
    ) -> float:
        if options["sinks"] is not None:
            options["sinks"] = numbers(options["sinks"])
        worst = 0.0
        for row, own in enumerate(metadata.valid_tokens(asked.shape[2])):
            assert np.isfinite(numbers(found[row])).all()
            if not own:
                continue
            keys, values = self._numbers_of(row, step, metadata)
            expected = dense_attention(
                numbers(asked[row, :, own.start : own.stop]), keys, values, **options
            )
            difference = numbers(found[row, :, own.start : own.stop]) - expected
            worst = max(worst, np.abs(difference).max())
        return worst

    def bytes(self) -> list[bytes]:
        """The bytes of all pages, in all slabs."""
        entries = [slab * STRIDE + page for slab in self.pages.slabs for page in range(SLAB_PAGES)]
        return [np.array(self.pages.page(entry)).tobytes() for entry in entries]

    def _numbers_of(
        self, row: int, step: Any, metadata: AttentionMetadata
    ) -> tuple[Numbers, Numbers]:
        geometry, length = self.pages.geometry, self.metadata.context_lens[row]
        keys, values = numbers_in(self.pages, self.metadata.block_tables[row], length)
        keys.insert(0, np.zeros((geometry.k_heads, 0, geometry.k_dim)))
        values.insert(0, np.zeros((geometry.k_heads, 0, geometry.v_dim)))
        if step is not None:
            own = metadata.valid_tokens(step[0].shape[2])[row]
            keys.append(numbers(step[0][row])[:, own.start : own.stop])
            values.append(numbers(step[1][row])[:, own.start : own.stop])
        return np.concatenate(keys, 1), np.concatenate(values, 1)


def written(
    backend: Any,
    geometry: LayerGeometry,
    formats: Sequence[FormatName],
    lengths: Sequence[int],
    right_padding: Sequence[int] = (),
    more: bool = False,
    tables: Sequence[tuple[int, ...]] = (),
) -> Batch:
    """Sequences of those lengths in pages of these formats; the write kernel writes them if all
    have 16 bits, and no tables are given. If `more`, each has room for the next token in a page of
    16 bits."""
    pages = new_pages(backend, geometry, formats)
    padding = tuple(right_padding) or (0,) * len(lengths)
    held = tuple(tables) or tables_for(pages, lengths)
    if more:
        held = _with_page_to_write(pages, held, lengths)
    metadata = AttentionMetadata(held, tuple(lengths), padding)
    shape = (len(lengths), geometry.k_heads, max(metadata.ends))
    keys = off_centre(normal((*shape, geometry.k_dim), geometry.k_dtype, seed=10))
    values = normal((*shape, geometry.v_dim), geometry.k_dtype, seed=11)
    if set(formats) == {"fp16"} and not tables:
        pages.write(keys, values, metadata)
    else:
        _hold(pages, keys, values, metadata)
    return Batch(pages, metadata)


def step_error(
    backend: GpuBackend,
    geometry: LayerGeometry,
    formats: Sequence[FormatName],
    lengths: Sequence[int],
    **options: Any,
) -> float:
    """The largest difference of a step that the kernel which attends also writes, to pages of 16
    bits behind those of these formats. They are then as the kernel that only writes leaves them."""
    batch, other = (written(backend, geometry, formats, lengths, more=True) for _ in range(2))
    error = batch.write_and_attend(backend, **options)
    other.write_and_attend(Separately(backend), **options)
    assert batch.bytes() == other.bytes()
    return error


def sharing(
    backend: Any,
    geometry: LayerGeometry,
    formats: Sequence[FormatName],
    tables: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    right_padding: Sequence[int] = (),
) -> Batch:
    """Sequences whose tables have pages in common, at places where all their tokens are written."""
    return written(backend, geometry, formats, lengths, right_padding, tables=tables)


def off_centre(keys: mx.array) -> mx.array:
    """Keys [..., tokens, dim] of normal numbers that are about 2 or -2 in all tokens, and differ
    from that by 0.5 in those of a page: softmax hides what all keys of a sequence have in common.
    """
    tokens, dim = keys.shape[-2:]
    pages = 0.5 * normal((-(-tokens // PAGE_SIZE), dim), mx.float32, seed=13)
    common = 2 * mx.sign(normal((dim,), mx.float32, seed=12))
    return (keys + common + mx.repeat(pages, PAGE_SIZE, 0)[:tokens]).astype(keys.dtype)


def _hold(pages: LayerPages, keys: mx.array, values: mx.array, metadata: AttentionMetadata) -> None:
    """Put a batch's keys and values into its pages, in their formats."""
    for entry, content in holding(pages, keys, values, metadata).items():
        pages.slabs[entry // STRIDE].memory[_lines(pages, entry)] = content
    mx.eval([slab.memory for slab in pages.slabs.values()])


def _with_page_to_write(
    pages: LayerPages, tables: tuple[tuple[int, ...], ...], lengths: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Tables whose page after the last token is in a slab of 16 bits of its own."""
    slab = len(pages.slabs)
    _map_slab(pages, slab, "fp16")
    return tuple(
        (*table[: length // PAGE_SIZE], slab * STRIDE + row)
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True))
    )


def _lines(pages: LayerPages, entry: int) -> slice:
    """Where a page is in its slab."""
    units = pages.layout_of(entry).page_units
    return slice(entry % STRIDE * units, (entry % STRIDE + 1) * units)
