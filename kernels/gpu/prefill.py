"""Plans and runs attention of several tokens per sequence, whether or not pages hold them yet."""

from dataclasses import dataclass

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import (
    BoundSlabs,
    PageKind,
    Scores,
    inputs_of,
    parameters,
    scores_of,
)
from paged_kv.kernels.gpu.kernels import DONE, Output, launch_of
from paged_kv.kernels.gpu.plan import LaunchPlan, Planner
from paged_kv.kernels.gpu.prefix import (
    Groups,
    partial_outputs,
    reader_of_steps,
    reader_of_values,
)
from paged_kv.kernels.gpu.tuning import LANES, prefill_threads
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import Unwritten
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.tables import Tables


@dataclass(frozen=True)
class PrefillArguments:
    """The arguments that the launches of several layers share.

    Attributes:
        shape: the shape of the queries.
        table_stride: the width of the tables.
        new_tokens: number of unwritten tokens of the step.
        groups: the numbers of groups that read shared pages, and of places of their results.
    """

    kind: PageKind
    shape: tuple[int, ...]
    table_stride: int
    scores: Scores
    new_tokens: int
    groups: Groups | None


class Prefill(Planner):
    """Attention of any number of query tokens per sequence."""

    _reader_of = staticmethod(reader_of_values)

    def __call__(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: mx.array,
        attention: Attention,
        unwritten: Unwritten | None,
    ) -> mx.array:
        """Outputs [B, q_heads, S, v_dim] of queries [B, q_heads, S, k_dim] in the pages' dtype."""
        arguments = PrefillArguments(
            slabs.kind,
            queries.shape,
            tables.array.shape[1],
            scores_of(attention),
            0 if unwritten is None else unwritten[0].shape[2],
            self._groups_of(tables, slabs.kind, queries.shape),
        )
        step, sinks = [*(unwritten or ())], inputs_of(attention)
        plan = self._plan(arguments)
        if plan.merge is None:
            inputs = [queries, *step, *sinks, *slabs.inputs, tables.array, plan.params]
            return self._order.run(pages, plan.attend, inputs)[0]
        return plan.run_and_merge(self._order, pages, slabs, tables, [queries], step, sinks)

    def _plan_of(self, arguments: PrefillArguments) -> LaunchPlan:
        geometry, (batch, heads, steps, _) = arguments.kind.geometry, arguments.shape
        gqa_group_size = heads // geometry.k_heads
        params = parameters(
            slab_stride=arguments.kind.slab_stride,
            table_stride=arguments.table_stride,
            kv_heads=geometry.k_heads,
            steps=steps,
            gqa_group_size=gqa_group_size,
            q_heads=heads,
            scale=arguments.scores.scale,
            softcap=arguments.scores.softcap,
            window=arguments.scores.window,
            causal=int(arguments.scores.hides_later),
            splits=1,
            bases=1,
            new_tokens=arguments.new_tokens,
        )
        dialect, sinks = self._kernels.dialect, arguments.scores.sinks_flag
        threads = prefill_threads(dialect, geometry.v_dim)
        reader = reader_of_steps(dialect, arguments.kind, threads)
        flags = [*reader.flags, *arguments.scores.softcap_flag]
        flags += ["HAS_NEW_TOKENS"] if arguments.new_tokens else []
        flags += ["WHOLE", *sinks] if arguments.groups is None else ["PARTIAL", "AFTER_PREFIX"]
        output = Output((batch, heads, steps, geometry.v_dim), geometry.k_dtype)
        attend = launch_of(
            self._kernels.kernel(reader.operation, geometry.k_dtype, reader.constants, flags),
            (-(-steps * gqa_group_size // reader.rows), geometry.k_heads, batch),
            threads,
            [output, DONE]
            if arguments.groups is None
            else partial_outputs(batch * heads * steps, geometry.v_dim),
        )
        if arguments.groups is None:
            return LaunchPlan(attend, None, params)
        merge = launch_of(
            self._kernels.kernel(
                "merge", geometry.k_dtype, {"V_DIM": geometry.v_dim}, [*sinks, "AFTER_PREFIX"]
            ),
            (heads * steps, batch, 1),
            LANES,
            [output],
        )
        prefix = self._prefix(arguments.groups, arguments.kind, heads, steps, arguments.scores)
        return LaunchPlan(attend, merge, params, prefix)
