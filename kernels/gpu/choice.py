"""Chooses the tokens that a step of one token per sequence reads: kernels/pages/choice.py for GPUs.

A kernel scores the summaries of all pages, and MLX's own operations choose by the scores. Nothing
is computed here, so that a step can be recorded.
"""

from functools import lru_cache

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import BoundSlabs, PageKind, parameters
from paged_kv.kernels.gpu.kernels import DONE, GpuKernels, Launch, Output, launch_of
from paged_kv.kernels.gpu.order import Order
from paged_kv.kernels.gpu.tuning import LANES, SCORE_SIMDGROUPS, scored_rows
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.choice import chosen_runs
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.kernels.pages.summaries import RUN_TOKENS
from paged_kv.kernels.pages.tables import Tables


class Choice:
    """Chooses runs by the summaries in pages."""

    def __init__(self, kernels: GpuKernels, order: Order) -> None:
        self._kernels = kernels
        self._order = order
        self._launch = lru_cache(maxsize=256)(self._launch_of)

    def __call__(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: mx.array,
        attention: Attention,
    ) -> mx.array:
        """The runs that queries [B, q_heads, 1, k_dim] in the pages' dtype read: int32 [B,
        kv_heads, read_tokens / 32], contiguous. Those of sequences that are read whole say nothing.
        """
        assert attention.read_tokens is not None
        shape, heads, scale = tables.array.shape, queries.shape[1], float(attention.scale)
        launch, params = self._launch(slabs.kind, *shape, heads, scale, tables.reach)
        inputs = [queries, *slabs.inputs, tables.array, params]
        scores, _ = self._order.run(pages, launch, inputs)
        runs = chosen_runs(scores, tables.array[:, 0], attention.read_tokens)
        return mx.contiguous(runs)

    def _launch_of(
        self, kind: PageKind, batch: int, width: int, heads: int, scale: float, reach: int
    ) -> tuple[Launch, mx.array]:
        """The launch for tables [batch, width] of that reach."""
        geometry = kind.geometry
        group = heads // geometry.k_heads
        rows = scored_rows(group, geometry.k_dim)
        constants = {"K_DIM": geometry.k_dim, "ROWS": rows, "SIMDGROUPS": SCORE_SIMDGROUPS}
        scores = batch, geometry.k_heads, group, reach // RUN_TOKENS
        launch = launch_of(
            self._kernels.kernel("score", geometry.k_dtype, constants, []),
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
