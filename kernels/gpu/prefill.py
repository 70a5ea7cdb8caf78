"""Plans and runs attention of several tokens per sequence, whether or not pages hold them yet."""

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import (
    BoundSlabs,
    PageKind,
    Scores,
    inputs_of,
    parameters,
    scores_of,
)
from paged_kv.kernels.gpu.kernels import DONE, GpuKernels, Launch, Output, launch_of
from paged_kv.kernels.gpu.order import Order
from paged_kv.kernels.gpu.tuning import PREFILL_ROWS, PREFILL_THREADS
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import NewTokens
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.tables import Tables


@dataclass(frozen=True)
class Asked:
    """The arguments that the launches of several layers share.

    Attributes:
        shape: the shape of the queries.
        table_stride: the width of the tables.
        new_tokens: number of unwritten tokens of the step.
    """

    kind: PageKind
    shape: tuple[int, ...]
    table_stride: int
    scores: Scores
    new_tokens: int


class Prefill:
    """Attention of any number of query tokens per sequence."""

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
        new_tokens: NewTokens | None,
    ) -> mx.array:
        """Outputs [B, q_heads, S, v_dim] of queries [B, q_heads, S, k_dim] in the pages' dtype."""
        asked = Asked(
            slabs.kind,
            queries.shape,
            tables.array.shape[1],
            scores_of(attention),
            0 if new_tokens is None else new_tokens[0].shape[2],
        )
        launch, params = self._launch(asked)
        inputs = [queries, *(new_tokens or ()), *inputs_of(attention)]
        inputs += [*slabs.inputs, tables.array, params]
        return self._order.run(pages, launch, inputs)[0]

    def _launch_of(self, asked: Asked) -> tuple[Launch, mx.array]:
        geometry, (batch, heads, steps, _) = asked.kind.geometry, asked.shape
        gqa_group_size = heads // geometry.k_heads
        params = parameters(
            slab_stride=asked.kind.slab_stride,
            table_stride=asked.table_stride,
            kv_heads=geometry.k_heads,
            steps=steps,
            gqa_group_size=gqa_group_size,
            q_heads=heads,
            scale=asked.scores.scale,
            softcap=asked.scores.softcap,
            window=asked.scores.window,
            causal=int(asked.scores.hides_later),
            new_tokens=asked.new_tokens,
        )
        flags = [*asked.kind.flags, *asked.scores.sinks_flag, *asked.scores.softcap_flag]
        flags += ["HAS_NEW_TOKENS"] if asked.new_tokens else []
        dims = {"K_DIM": geometry.k_dim, "V_DIM": geometry.v_dim}
        rows = PREFILL_ROWS[self._kernels.dialect]
        launch = launch_of(
            self._kernels.kernel("prefill", geometry.k_dtype, dims, flags),
            (-(-steps * gqa_group_size // rows), geometry.k_heads, batch),
            PREFILL_THREADS,
            [Output((batch, heads, steps, geometry.v_dim), geometry.k_dtype), DONE],
        )
        return launch, params
