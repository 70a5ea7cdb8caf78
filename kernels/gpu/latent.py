"""Plans and runs latent attention of one token per sequence.

One launch attends to the parts of contexts, and another merges them. Sequences that share pages
take three.
"""

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import BoundSlabs, parameters, scores_of
from paged_kv.kernels.gpu.kernels import Output, launch_of
from paged_kv.kernels.gpu.plan import DecodeArguments, LaunchPlan, StepPlanner
from paged_kv.kernels.gpu.prefix import Groups, partial_outputs, reader_of_latents
from paged_kv.kernels.gpu.tuning import LANES, LATENT_ROWS, LATENT_SIMDGROUPS, latent_parts
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.tables import Tables


class Latent(StepPlanner):
    """Latent attention of one query token per sequence."""

    _reader_of = staticmethod(reader_of_latents)

    def __call__(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: mx.array,
        position_queries: mx.array,
        attention: Attention,
    ) -> mx.array:
        """Outputs [B, q_heads, 1, k_dim] of queries [B, q_heads, 1, k_dim] and position queries [B,
        q_heads, 1, v_dim] in the pages' dtype."""
        key = slabs.kind, queries.shape[1], scores_of(attention)
        plan: LaunchPlan | None = tables.plans.get(key)
        if plan is None:
            plan = self._plan_for(tables, key, queries.shape)
        both = [queries, position_queries]
        return plan.run_and_merge(self._order, pages, slabs, tables, both, [], [])

    def _plan_of(
        self, arguments: DecodeArguments, reach: int, batch: int, width: int, groups: Groups | None
    ) -> LaunchPlan:
        """The plan for tables [batch, width] of that reach. Cached."""
        kind, heads, scores, *_ = arguments
        longest = reach
        if scores.window:
            longest = min(longest, scores.window) + LATENT_SIMDGROUPS
        tiles, splits = latent_parts(self._kernels.dialect, batch, heads, longest)
        geometry = kind.geometry
        params = parameters(
            slab_stride=kind.slab_stride,
            table_stride=width,
            kv_heads=1,
            steps=1,
            gqa_group_size=heads,
            scale=scores.scale,
            window=scores.window,
            splits=splits,
            split_tiles=tiles,
            bases=1,
        )
        after_prefix = [] if groups is None else ["AFTER_PREFIX"]
        constants = {"K_DIM": geometry.k_dim, "V_DIM": geometry.v_dim}
        constants |= {"ROWS": LATENT_ROWS, "SIMDGROUPS": LATENT_SIMDGROUPS}
        attend = launch_of(
            self._kernels.kernel(
                "latent", geometry.k_dtype, constants, [*kind.flags, *after_prefix]
            ),
            (-(-heads // (LATENT_ROWS * LATENT_SIMDGROUPS)), splits, batch),
            LANES * LATENT_SIMDGROUPS,
            partial_outputs(batch * heads * splits, geometry.k_dim),
        )
        merge = self._kernels.kernel(
            "merge", geometry.k_dtype, {"V_DIM": geometry.k_dim}, after_prefix
        )
        output = Output((batch, heads, 1, geometry.k_dim), geometry.k_dtype)
        prefix = self._prefix(groups, kind, heads, 1, scores)
        return LaunchPlan(
            attend, launch_of(merge, (heads, batch, 1), LANES, [output]), params, prefix
        )
