"""Runs the kernels that move tokens in and out of pages: write, gather and copy; the one that
summarises pages which are full; and the one that scores summaries, by which a step of one token
per sequence chooses what it reads (kernels/pages/choice.py)."""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from paged_kv.kernels.gpu.arrays import BoundSlabs, PageKind, parameters
from paged_kv.kernels.gpu.kernels import DONE, GpuKernels, Launch, Output
from paged_kv.kernels.gpu.order import Order
from paged_kv.kernels.gpu.tuning import LANES, SCORE_SIMDGROUPS, SLOT_SIMDGROUPS, scored_rows
from paged_kv.kernels.pages.attention_metadata import Attention, Unwritten
from paged_kv.kernels.pages.backend import LayerMemory
from paged_kv.kernels.pages.choice import RUNS_OF_PAGE, chosen_runs
from paged_kv.kernels.pages.number_format import CENTRE_PARTS
from paged_kv.kernels.pages.page_format import PAGE_SIZE, RUN_TOKENS
from paged_kv.kernels.pages.tables import TABLE_WIDTH, Tables

assert SLOT_SIMDGROUPS == CENTRE_PARTS  # copies sum a part of a page in each simdgroup


class SlotKernels:
    """Launches the kernels. Each simdgroup moves a token's keys, or its values, of one head."""

    def __init__(self, kernels: GpuKernels, order: Order) -> None:
        self._kernels = kernels
        self._order = order
        self._launch = lru_cache(maxsize=256)(self._launch_of)
        self._score = lru_cache(maxsize=256)(self._score_of)

    def write(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        keys: mx.array,
        values: mx.array,
    ) -> None:
        """Write a step [B, heads, S, dim]; see `Backend.write`."""
        (batch, width), count = tables.array.shape, keys.shape[2]
        launch, params = self._launch("write", slabs.kind, batch, count, width)
        inputs = [keys, values, *slabs.inputs, tables.array, params]
        self._order.run(pages, launch, inputs)

    def gather(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        tokens: int,
        unwritten: Unwritten | None,
    ) -> tuple[mx.array, mx.array]:
        """Keys and values [B, heads, tokens, dim]; see `Backend.gather`."""
        (batch, width), count = tables.array.shape, unwritten[0].shape[2] if unwritten else 0
        launch, params = self._launch("gather", slabs.kind, batch, tokens, width, count)
        inputs = [*(unwritten or ()), *slabs.inputs, tables.array, params]
        keys, values, _ = self._order.run(pages, launch, inputs)
        return keys, values

    def copy(self, pages: LayerMemory, slabs: BoundSlabs, pairs: Sequence[tuple[int, ...]]) -> None:
        """Copy pages (from entry, to entry), with entries that number the bound slabs."""
        table = np.zeros((len(pairs), TABLE_WIDTH), np.int32)
        table[:, :2] = pairs
        launch, params = self._launch("copy", slabs.kind, len(pairs), PAGE_SIZE, TABLE_WIDTH)
        self._order.run(pages, launch, [*slabs.inputs, mx.array(table), params])

    def summarise(self, pages: LayerMemory, slabs: BoundSlabs, entries: Sequence[int]) -> None:
        """Summarise full pages of 16 bits, with entries that number the bound slabs."""
        table = np.zeros((len(entries), TABLE_WIDTH), np.int32)
        table[:, 0] = entries
        launch, params = self._launch(
            "summarise", slabs.kind, len(entries), RUNS_OF_PAGE, TABLE_WIDTH
        )
        self._order.run(pages, launch, [*slabs.inputs, mx.array(table), params])

    def choose(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: mx.array,
        attention: Attention,
    ) -> mx.array:
        """The runs that queries [B, q_heads, 1, k_dim] in the pages' dtype read: int32 [B,
        kv_heads, read_tokens / 32], contiguous. Those of sequences that are read whole say nothing.
        MLX's operations choose by scores of all pages, lazily, so that a step can be recorded.
        """
        assert attention.read_tokens is not None
        shape, heads, scale = tables.array.shape, queries.shape[1], float(attention.scale)
        launch, params = self._score(slabs.kind, *shape, heads, scale, tables.reach)
        inputs = [queries, *slabs.inputs, tables.array, params]
        scores, _ = self._order.run(pages, launch, inputs)
        return mx.contiguous(chosen_runs(scores, tables.array[:, 0], attention.read_tokens))

    def _launch_of(
        self,
        operation: str,
        kind: PageKind,
        batch: int,
        tokens: int,
        width: int,
        new_tokens: int = 0,
    ) -> tuple[Launch, mx.array]:
        """The launch for `batch` rows of the tables with `tokens` tokens, or summaries, each."""
        geometry = kind.geometry
        # A page that is written holds floats, whatever the others hold.
        flags = [] if operation in ("write", "summarise") else [*kind.flags]
        if operation == "copy" and geometry.has_summaries:
            flags.append("HAS_SUMMARIES")
        if new_tokens:
            flags.append("HAS_NEW_TOKENS")
        outputs = [
            Output((batch, geometry.k_heads, tokens, dim), geometry.k_dtype)
            for dim in kind.dims.values()
        ]
        sides = 1 if operation == "summarise" else 2
        launch = self._kernels.launch(
            operation,
            geometry.k_dtype,
            kind.dims,
            flags,
            (-(-tokens // SLOT_SIMDGROUPS), geometry.k_heads, sides * batch),
            LANES * SLOT_SIMDGROUPS,
            [*outputs, DONE] if operation == "gather" else [DONE],
        )
        params = parameters(
            slab_stride=kind.slab_stride,
            table_stride=width,
            kv_heads=geometry.k_heads,
            steps=tokens,
            tokens=tokens,
            new_tokens=new_tokens,
        )
        return launch, params

    def _score_of(
        self, kind: PageKind, batch: int, width: int, heads: int, scale: float, reach: int
    ) -> tuple[Launch, mx.array]:
        """The launch that scores for tables [batch, width] of that reach."""
        geometry = kind.geometry
        group = heads // geometry.k_heads
        rows = scored_rows(group, geometry.k_dim)
        scores = batch, geometry.k_heads, group, reach // RUN_TOKENS
        launch = self._kernels.launch(
            "score",
            geometry.k_dtype,
            {"K_DIM": geometry.k_dim, "ROWS": rows, "SIMDGROUPS": SCORE_SIMDGROUPS},
            [],
            (
                -(-reach // (PAGE_SIZE * SCORE_SIMDGROUPS)),
                geometry.k_heads * -(-group // rows),
                batch,
            ),
            LANES * SCORE_SIMDGROUPS,
            [Output(scores, mx.float32), DONE],
        )
        params = parameters(
            slab_stride=kind.slab_stride,
            table_stride=width,
            kv_heads=geometry.k_heads,
            gqa_group_size=group,
            scale=scale,
            tokens=reach,
        )
        return launch, params
