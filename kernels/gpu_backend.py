"""Pages through kernels on a GPU, which write them in place.

Everything here is lazy. `gpu_order` says what makes reads wait for writes and writes for reads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from paged_kv.kernels.gpu_arrays import (
    BoundSlabs,
    bind,
    bound_slabs,
    parameters,
    tables_of,
)
from paged_kv.kernels.gpu_kernels import DONE, SLABS, GpuKernels, Maker, Output
from paged_kv.kernels.gpu_order import Order
from paged_kv.kernels.gpu_tuning import (
    DECODE_SIMDGROUPS,
    LANES,
    PREFILL_ROWS,
    PREFILL_THREADS,
    ROW_SIMDGROUPS,
    TILE,
    query_rows,
    row_blocks,
    split_tiles,
)
from paged_kv.kernels.layer_geometry import LayerGeometry
from paged_kv.kernels.page_format import PAGE_SIZE
from paged_kv.kernels.page_rows import PageRows, Tail
from paged_kv.kernels.plain_backend import PlainBackend
from paged_kv.kernels.say_once import say_once

if TYPE_CHECKING:
    from paged_kv.kernels.layer_pages import LayerPages

HEAD_SIZES = {64, 80, 96, 128, 192, 256}
DTYPES = {mx.float16, mx.bfloat16}
LOG2_E = math.log2(math.e)

Template = list[tuple[str, Any]]


class GpuBackend:
    """See `Backend` for the operations.

    Args:
        dialect: "metal" or "cuda".
        maker: compiles a kernel of that dialect.

    Attributes:
        fallbacks: how often plain MLX operations had to do it, because a batch has pages in more
            slabs than a kernel takes.
    """

    writes_in_place = True

    def __init__(self, dialect: str, maker: Maker) -> None:
        self.name = dialect
        self.kernels = GpuKernels(dialect, maker)
        self.order = Order()
        self.fallbacks = 0
        self._plain = PlainBackend()

    def supports(self, geometry: LayerGeometry) -> bool:
        return (
            geometry.k_heads == geometry.v_heads
            and {geometry.k_dim, geometry.v_dim} <= HEAD_SIZES
            and geometry.k_dtype == geometry.v_dtype
            and geometry.k_dtype in DTYPES
        )

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        return self._plain.new_slab(pages, page_units, unit_words)

    def settle(self, pages: "LayerPages") -> None:
        mx.eval(self.order.before(pages))

    def flush(self, pages: "LayerPages") -> None:
        """Kernels that are still to run hold the memory that they need."""

    def write(self, pages: "LayerPages", keys: mx.array, values: mx.array, rows: PageRows) -> None:
        tables = tables_of(rows, pages.slab_stride)
        if len(tables.slabs) > SLABS:
            self._fall_back(pages)
            self._plain.write(pages, keys, values, rows)
            return
        batch, heads, count, _ = keys.shape
        if not tables.slabs or not count:
            return
        params = self._parameters(pages, tables.array, steps=count)
        groups = (-(-count // ROW_SIMDGROUPS), heads, 2 * batch)
        slabs = bound_slabs(pages, tables.slabs)
        self._run(pages, "write", [keys, values], slabs, tables.array, params, groups)

    def begin(self, *arrays: mx.array) -> None:
        """No write waits for anything: kernels are computed with all the rest of a step."""

    def load(self, pages: "LayerPages", contents: Mapping[int, mx.array]) -> None:
        """By copying from an array that is laid out as a slab of only these pages."""
        for layout in {pages.layout_of(entry) for entry in contents}:
            entries = [entry for entry in contents if pages.layout_of(entry) == layout]
            memory = mx.concatenate([mx.contiguous(contents[entry]) for entry in entries])
            mx.eval(memory)
            for slab in {entry // pages.slab_stride for entry in entries}:
                mine = [each for each in enumerate(entries) if each[1] // pages.slab_stride == slab]
                pairs = [(at, pages.slab_stride + entry % pages.slab_stride) for at, entry in mine]
                target = pages.slabs[slab]
                bound = bind({0: (memory, layout), 1: (target.memory, target.layout)})
                self._copy(pages, bound, pairs)

    def copy(self, pages: "LayerPages", copies: Mapping[int, int]) -> None:
        stride = pages.slab_stride
        slabs = sorted({entry // stride for pair in copies.items() for entry in pair})
        if len(slabs) > SLABS:
            self._fall_back(pages)
            self._plain.convert(pages, copies)
            return
        pairs = [
            tuple(slabs.index(entry // stride) * stride + entry % stride for entry in pair)
            for pair in copies.items()
        ]
        if pairs:
            self._copy(pages, bound_slabs(pages, tuple(slabs)), pairs)

    convert = copy

    def gather(
        self, pages: "LayerPages", rows: PageRows, tail: Tail | None
    ) -> tuple[mx.array, mx.array]:
        tables = tables_of(rows, pages.slab_stride)
        if len(tables.slabs) > SLABS or not pages.slabs:
            self._fall_back(pages)
            keys, values = self._plain.gather(pages, rows, tail)
            mx.eval(keys, values)
            return keys, values
        geometry, batch, length = pages.geometry, len(rows.context_lens), max(rows.ends)
        heads, dtype = geometry.k_heads, geometry.k_dtype
        shapes = [(batch, heads, length, dim) for dim in (geometry.k_dim, geometry.v_dim)]
        if not length:
            return mx.zeros(shapes[0], dtype), mx.zeros(shapes[1], dtype)
        count = tail[0].shape[2] if tail else 0
        params = self._parameters(pages, tables.array, tail=count, tokens=length)
        keys, values, _ = self._launch(
            pages,
            "gather",
            [*self._tail(pages, tail)],
            bound_slabs(pages, tables.slabs or tuple(pages.slabs)[:1]),
            tables.array,
            params,
            (-(-length // ROW_SIMDGROUPS), heads, 2 * batch),
            outputs=[Output(shape, dtype) for shape in shapes],
        )
        return keys, values

    def attend(
        self,
        pages: "LayerPages",
        queries: mx.array,
        rows: PageRows,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        sinks: mx.array | None,
        tail: Tail | None,
    ) -> mx.array:
        dtype, own = queries.dtype, pages.geometry.k_dtype
        tables = tables_of(rows, pages.slab_stride)
        if len(tables.slabs) > SLABS or not pages.slabs:
            self._fall_back(pages)
            output = self._plain.attend(
                pages,
                queries,
                rows,
                scale=scale,
                causal=causal,
                window=window,
                sinks=sinks,
                tail=tail,
            )
            mx.eval(output)
            return output
        heads, steps = queries.shape[1:3]
        given = {
            "steps": steps,
            "ratio": heads // pages.geometry.k_heads,
            "q_heads": heads,
            "scale": scale * LOG2_E,
            "window": window or 0,
            "causal": int(causal or window is not None),
            "has_sinks": int(sinks is not None),
        }
        slabs = bound_slabs(pages, tables.slabs or tuple(pages.slabs)[:1])
        attend = self._decode if steps == 1 and tail is None else self._prefill
        queries = queries.astype(own)
        return attend(pages, queries, rows, slabs, given, _padded(sinks), tail).astype(dtype)

    def _decode(
        self,
        pages: "LayerPages",
        queries: mx.array,
        rows: PageRows,
        slabs: BoundSlabs,
        given: dict[str, Any],
        sinks: mx.array,
        tail: Tail | None,
    ) -> mx.array:
        geometry, (batch, heads, _, _) = pages.geometry, queries.shape
        ratio, longest = given["ratio"], max(rows.context_lens)
        if given["window"]:
            longest = min(longest, given["window"] + TILE)
        row_count = query_rows(ratio)
        blocks = row_blocks(ratio, geometry.k_dim, 1 if slabs.formats == 1 else 2)
        parts = DECODE_SIMDGROUPS // blocks
        block_groups = -(-ratio // (row_count * blocks))
        tiles = split_tiles(longest, batch * geometry.k_heads * block_groups * blocks)
        splits = max(1, -(-(longest + TILE) // (tiles * TILE)))
        given |= {
            "splits": splits,
            "split_tiles": tiles,
            "first_basis": slabs.bases[0],
            "bases": len(slabs.bases),
        }
        tables = tables_of(rows, pages.slab_stride).array
        params = self._parameters(pages, tables, **given)
        slots = batch * heads * splits * len(slabs.bases)
        partials, measures, done = self._launch(
            pages,
            "decode",
            [queries],
            slabs,
            tables,
            params,
            (geometry.k_heads * block_groups, -(-splits // parts), batch * len(slabs.bases)),
            threads=LANES * parts * blocks,
            outputs=[Output((slots, geometry.v_dim), mx.float32), Output((slots, 2), mx.float32)],
            more=[
                ("ROWS", row_count),
                ("BLOCKS", blocks),
                ("PARTS", parts),
                ("FORMATS", slabs.formats),
            ],
        )
        self.order.after(pages, done)
        (output,) = self.kernels.run(
            "merge",
            [partials, measures, sinks, params],
            [("T", geometry.k_dtype), ("V_DIM", geometry.v_dim)],
            (heads, batch, 1),
            LANES,
            [Output((batch, heads, 1, geometry.v_dim), geometry.k_dtype)],
        )
        return output

    def _prefill(
        self,
        pages: "LayerPages",
        queries: mx.array,
        rows: PageRows,
        slabs: BoundSlabs,
        given: dict[str, Any],
        sinks: mx.array,
        tail: Tail | None,
    ) -> mx.array:
        geometry, (batch, heads, steps, _) = pages.geometry, queries.shape
        tables = tables_of(rows, pages.slab_stride).array
        count = tail[0].shape[2] if tail else 0
        params = self._parameters(pages, tables, tail=count, **given)
        row_count = steps * given["ratio"]
        output, done = self._launch(
            pages,
            "prefill",
            [queries, *self._tail(pages, tail), sinks],
            slabs,
            tables,
            params,
            (-(-row_count // PREFILL_ROWS[self.name]), geometry.k_heads, batch),
            threads=PREFILL_THREADS,
            outputs=[Output((batch, heads, steps, geometry.v_dim), geometry.k_dtype)],
            more=[("FORMATS", slabs.formats)],
        )
        self.order.after(pages, done)
        return output

    def _copy(
        self, pages: "LayerPages", slabs: BoundSlabs, pairs: Sequence[tuple[int, ...]]
    ) -> None:
        """Copy pages by their entries among these slabs."""
        width = 16
        tables = np.zeros((len(pairs), width), np.int32)
        tables[:, :2] = pairs
        array = mx.array(tables)
        params = self._parameters(pages, array)
        groups = (PAGE_SIZE // ROW_SIMDGROUPS, pages.geometry.k_heads, 2 * len(pairs))
        self._run(pages, "copy", [], slabs, array, params, groups)

    def _tail(self, pages: "LayerPages", tail: Tail | None) -> Tail:
        """One for a kernel, which needs some array."""
        geometry = pages.geometry
        if tail is None:
            return (
                mx.zeros((1, 1, 1, geometry.k_dim), geometry.k_dtype),
                mx.zeros((1, 1, 1, geometry.v_dim), geometry.k_dtype),
            )
        keys, values = tail
        return keys.astype(geometry.k_dtype), values.astype(geometry.k_dtype)

    def _parameters(self, pages: "LayerPages", tables: mx.array, **given: int | float) -> mx.array:
        return parameters(
            slab_stride=pages.slab_stride,
            table_stride=tables.shape[1],
            kv_heads=pages.geometry.k_heads,
            **given,
        )

    def _run(
        self,
        pages: "LayerPages",
        operation: str,
        inputs: list[mx.array],
        slabs: BoundSlabs,
        tables: mx.array,
        params: mx.array,
        groups: tuple[int, int, int],
    ) -> None:
        """What changes pages, and gives nothing else."""
        (done,) = self._launch(pages, operation, inputs, slabs, tables, params, groups)
        self.order.after(pages, done)

    def _launch(
        self,
        pages: "LayerPages",
        operation: str,
        inputs: list[mx.array],
        slabs: BoundSlabs,
        tables: mx.array,
        params: mx.array,
        groups: tuple[int, int, int],
        *,
        threads: int = LANES * ROW_SIMDGROUPS,
        outputs: list[Output] | None = None,
        more: Template | None = None,
    ) -> list[mx.array]:
        geometry = pages.geometry
        template: Template = [("T", geometry.k_dtype)]
        template += [("K_DIM", geometry.k_dim), ("V_DIM", geometry.v_dim)]
        return self.kernels.run(
            operation,
            [*inputs, *slabs.memory, slabs.layouts, tables, params, self.order.before(pages)],
            template + (more or []),
            groups,
            threads,
            [*(outputs or []), DONE],
        )

    def _fall_back(self, pages: "LayerPages") -> None:
        """Plain operations may follow: what kernels were asked for is done."""
        self.fallbacks += 1
        say_once(
            f"a batch has pages in more than {SLABS} slabs, so plain MLX operations serve it, "
            "which are slower. A smaller max_bytes makes fewer slabs, and compact() empties some"
        )
        self.settle(pages)


def _padded(sinks: mx.array | None) -> mx.array:
    """float32 [at least 8]."""
    if sinks is None:
        return mx.zeros((8,), mx.float32)
    floats = sinks.astype(mx.float32)
    return mx.pad(floats, (0, max(0, 8 - floats.size)))
