"""Plans and runs attention of one token per sequence: one launch, or two for long contexts.

Sequences that share pages take three. The kernel that reads a sequence's own pages also writes the
step, if it gets one. A step that reads chosen tokens (kernels/gpu/choice.py) is planned as one of
so short a context. All inputs but a layer's own arrays are the same in all layers of a kind, and
are made once per step.
"""

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import BoundSlabs, inputs_of, parameters, scores_of
from paged_kv.kernels.gpu.kernels import DONE, Output, launch_of
from paged_kv.kernels.gpu.plan import DecodeArguments, LaunchPlan, StepPlanner
from paged_kv.kernels.gpu.prefix import Groups, partial_outputs, reader_of_values
from paged_kv.kernels.gpu.tuning import LANES, TILE, decode_shape
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import Unwritten
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.tables import Tables


class Decode(StepPlanner):
    """Attention of one query token per sequence."""

    _reader_of = staticmethod(reader_of_values)

    def __call__(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: mx.array,
        attention: Attention,
        step: Unwritten | None,
        runs: mx.array | None = None,
    ) -> mx.array:
        """Outputs [B, q_heads, 1, v_dim] of queries [B, q_heads, 1, k_dim] in the pages' dtype.

        Args:
            step: is written too.
            runs: the runs to read of sequences that have more than `read_tokens` tokens; None to
                read all.
        """
        # Not yet `DecodeArguments`, nor `inputs_of` without sinks: each is a call in every layer.
        read = 0 if runs is None else attention.read_tokens
        key = slabs.kind, queries.shape[1], scores_of(attention), step is not None, read
        plan: LaunchPlan | None = tables.plans.get(key)
        if plan is None:
            plan = self._plan_for(tables, key, queries.shape)
        sinks = [] if attention.sinks is None else inputs_of(attention)
        own = [*(step or ())] if runs is None else [*(step or ()), runs]
        if plan.merge is None:
            inputs = [queries, *own, *sinks, *slabs.inputs, tables.array, plan.params]
            return self._order.run(pages, plan.attend, inputs)[0]
        return plan.run_and_merge(self._order, pages, slabs, tables, [queries], own, sinks)

    def _plan_of(
        self, arguments: DecodeArguments, reach: int, batch: int, width: int, groups: Groups | None
    ) -> LaunchPlan:
        """The plan for tables [batch, width] of that reach. Cached."""
        longest = min(reach, arguments.read_tokens or reach)
        if arguments.scores.window:
            longest = min(longest, arguments.scores.window) + TILE
        kind, geometry = arguments.kind, arguments.kind.geometry
        rotates = "HAS_CODES" in kind.flags
        shape = decode_shape(
            self._kernels.dialect,
            batch,
            arguments.heads,
            geometry.k_heads,
            (geometry.k_dim, geometry.v_dim),
            longest,
            bases=1 + rotates,
        )
        bases = len(kind.bases)
        is_whole = shape.splits * bases == 1 and groups is None
        after_prefix = [] if groups is None else ["AFTER_PREFIX"]
        params = parameters(
            slab_stride=kind.slab_stride,
            table_stride=width,
            kv_heads=geometry.k_heads,
            steps=1,
            gqa_group_size=arguments.heads // geometry.k_heads,
            q_heads=arguments.heads,
            causal=1,
            scale=arguments.scores.scale,
            softcap=arguments.scores.softcap,
            window=arguments.scores.window,
            splits=shape.splits,
            split_tiles=shape.tiles,
            first_basis=kind.bases[0],
            bases=bases,
            tokens=arguments.read_tokens,
        )
        dims = {"K_DIM": geometry.k_dim, "V_DIM": geometry.v_dim}
        sizes = {"ROWS": shape.rows, "BLOCKS": shape.blocks, "PARTS": shape.parts}
        sinks = arguments.scores.sinks_flag
        flags = [*kind.flags, *arguments.scores.softcap_flag, *after_prefix]
        flags += ["WHOLE", *sinks] if is_whole else ["PARTIAL"]
        if arguments.writes:
            flags.append("STEP")
        if arguments.read_tokens:
            flags.append("CHOSEN")
        output = Output((batch, arguments.heads, 1, geometry.v_dim), geometry.k_dtype)
        attend = launch_of(
            self._kernels.kernel("decode", geometry.k_dtype, dims | sizes, flags),
            (geometry.k_heads * shape.groups, shape.splits, batch * bases),
            LANES * shape.parts * shape.blocks,
            [output, DONE]
            if is_whole
            else partial_outputs(batch * arguments.heads * shape.splits * bases, geometry.v_dim),
        )
        if is_whole:
            return LaunchPlan(attend, None, params)
        turns = ["HAS_CODES"] if 1 in kind.bases else []
        kernel = self._kernels.kernel(
            "merge", geometry.k_dtype, {"V_DIM": geometry.v_dim}, [*turns, *sinks, *after_prefix]
        )
        merge = launch_of(kernel, (arguments.heads, batch, 1), LANES, [output])
        prefix = self._prefix(groups, kind, arguments.heads, 1, arguments.scores)
        return LaunchPlan(attend, merge, params, prefix)
