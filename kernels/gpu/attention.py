"""Plans and runs attention to pages: of one token per sequence, of several, and to latents.

One launch reads the pages of each sequence. Another merges its results where it has several for a
query. Sequences that share pages take one more, before these (kernels/gpu/prefix.py). A step that
reads chosen tokens (kernels/gpu/choice.py) is planned as one of so short a context. All inputs but
a layer's own arrays are the same in all layers of a kind, and are made once per step.
"""

from functools import lru_cache
from typing import Any, NamedTuple

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
from paged_kv.kernels.gpu.prefix import (
    Groups,
    MatrixReader,
    groups_of,
    partial_outputs,
    prefix_launch,
    reader_of_latents,
    reader_of_steps,
    reader_of_values,
)
from paged_kv.kernels.gpu.tuning import (
    LANES,
    LATENT_ROWS,
    LATENT_SIMDGROUPS,
    TILE,
    decode_shape,
    latent_parts,
    prefill_threads,
)
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import Unwritten
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.tables import Tables


class Call(NamedTuple):
    """What the launches of several layers share.

    Attributes:
        shape: of the queries, [B, q_heads, S, k_dim].
        is_latent: whether there are position queries.
        writes: whether the kernel also writes the step.
        new_tokens: tokens of the step that no page holds, nor gets.
        read_tokens: how many tokens of a sequence it reads at most, chosen ones; 0 for all.
    """

    kind: PageKind
    shape: tuple[int, ...]
    scores: Scores
    is_latent: bool
    writes: bool
    new_tokens: int
    read_tokens: int

    def longest(self, reach: int, tile: int) -> int:
        """The most tokens of a sequence that are read, if tables have that reach."""
        longest = min(reach, self.read_tokens or reach)
        return min(longest, self.scores.window) + tile if self.scores.window else longest


class PageReader(NamedTuple):
    """A kernel that reads the pages of each sequence.

    Attributes:
        operation: see `GpuKernels.kernel`, as for `constants` and `flags`.
        groups: threadgroups.
        threads: of a threadgroup.
        splits: parts of a context.
        tiles: of a part.
        bases: of values, each of which has results of its own.
    """

    operation: str
    constants: dict[str, int]
    flags: list[str]
    groups: tuple[int, int, int]
    threads: int
    splits: int = 1
    tiles: int = 0
    bases: tuple[int, ...] = (0,)


class LaunchPlan(NamedTuple):
    """Launches, and their parameters.

    Attributes:
        attend: attention to pages, or to those that no group reads.
        merge: None if nothing is partial.
        params: of all launches.
        prefix: attention of groups of sequences to the pages that they share.
    """

    attend: Launch
    merge: Launch | None
    params: mx.array
    prefix: Launch | None = None


class PagedAttention:
    """Attention of any number of query tokens per sequence."""

    def __init__(self, kernels: GpuKernels, order: Order) -> None:
        self._kernels = kernels
        self._order = order
        self._plan = lru_cache(maxsize=256)(self._plan_of)

    def __call__(
        self,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: list[mx.array],
        attention: Attention,
        step: Unwritten | None = None,
        unwritten: Unwritten | None = None,
        runs: mx.array | None = None,
    ) -> mx.array:
        """Outputs [B, q_heads, S, v_dim], or [B, q_heads, S, k_dim] of latents.

        Args:
            queries: in the pages' dtype [B, q_heads, S, k_dim]; and for latents, of which S is 1,
                position queries.
            step: is written too, if S is 1.
            unwritten: is attended to too.
            runs: the runs to read of sequences that have more than `read_tokens` tokens; None to
                read all.
        """
        # Not yet a `Call`, nor `inputs_of` without sinks: each is a call in every layer.
        new_tokens = 0 if unwritten is None else unwritten[0].shape[2]
        read = 0 if runs is None else attention.read_tokens
        scores, shape, is_latent = scores_of(attention), queries[0].shape, len(queries) > 1
        key = slabs.kind, shape, scores, is_latent, step is not None, new_tokens, read
        plan: LaunchPlan | None = tables.plans.get(key)
        if plan is None:
            plan = self._plan_for(tables, key)
        sinks = [] if attention.sinks is None else inputs_of(attention)
        own = [*queries, *(step or unwritten or ())]
        if runs is not None:
            own.append(runs)
        if plan.merge is None:
            inputs = [*own, *sinks, *slabs.inputs, tables.array, plan.params]
            return self._order.run(pages, plan.attend, inputs)[0]
        of_pages, shared = [*slabs.inputs, tables.array, plan.params], []
        if plan.prefix is not None:
            assert tables.groups is not None
            inputs = [*queries, tables.groups.array, *of_pages]
            shared = [*self._order.run(pages, plan.prefix, inputs)[:-1], tables.array]
        partials, measures, _ = self._order.run(pages, plan.attend, [*own, *of_pages])
        return plan.merge(inputs=[partials, measures, *shared, *sinks, plan.params])[0]

    def _plan_for(self, tables: Tables, key: tuple[Any, ...]) -> LaunchPlan:
        """The plan for these tables and the fields of a `Call`, kept with the tables."""
        call, groups = Call(*key), None
        # Sequences that share pages choose differently.
        if tables.groups is not None and not call.read_tokens:
            groups = groups_of(tables.groups, self._group_reader(call), call.kind, call.shape)
        reach = tables.reach if groups is None else tables.own_reach
        plan = tables.plans[key] = self._plan(call, reach, tables.array.shape[1], groups)
        return plan

    def _plan_of(self, call: Call, reach: int, width: int, groups: Groups | None) -> LaunchPlan:
        """The plan for tables [B, width] of that reach. Cached."""
        (batch, heads, steps, _), geometry = call.shape, call.kind.geometry
        reader, dtype = self._reader(call, reach), geometry.k_dtype
        params = _parameters(call, reader, width)
        parts = reader.splits * len(reader.bases)
        dim = geometry.k_dim if call.is_latent else geometry.v_dim
        output = Output((batch, heads, steps, dim), dtype)
        sinks, constants = call.scores.sinks_flag, call.kind.dims | reader.constants
        if parts == 1 and groups is None and not call.is_latent:
            flags = [*reader.flags, "WHOLE", *sinks]
            kernel = self._kernels.kernel(reader.operation, dtype, constants, flags)
            attend = launch_of(kernel, reader.groups, reader.threads, [output, DONE])
            return LaunchPlan(attend, None, params)
        after_prefix, prefix = [], None
        if groups is not None:
            after_prefix = ["AFTER_PREFIX"]
            of_groups = self._group_reader(call)
            prefix = prefix_launch(self._kernels, of_groups, groups, call.kind, call.shape)
        flags = [*reader.flags, "PARTIAL", *after_prefix]
        kernel = self._kernels.kernel(reader.operation, dtype, constants, flags)
        results = partial_outputs(batch * heads * steps * parts, dim)
        attend = launch_of(kernel, reader.groups, reader.threads, results)
        turns = ["HAS_CODES"] if 1 in reader.bases else []
        kernel = self._kernels.kernel(
            "merge", dtype, {"V_DIM": dim}, [*turns, *sinks, *after_prefix]
        )
        merge = launch_of(kernel, (heads * steps, batch, 1), LANES, [output])
        return LaunchPlan(attend, merge, params, prefix)

    def _group_reader(self, call: Call) -> MatrixReader:
        """What reads the pages that sequences share."""
        of_pages = reader_of_latents if call.is_latent else reader_of_values
        return of_pages(self._kernels.dialect, call.kind, call.scores.softcap_flag)

    def _reader(self, call: Call, reach: int) -> PageReader:
        if call.is_latent:
            return self._latent_reader(call, reach)
        if call.shape[2] == 1 and not call.new_tokens:
            return self._decode_reader(call, reach)
        return self._prefill_reader(call)

    def _decode_reader(self, call: Call, reach: int) -> PageReader:
        """For one query token per sequence."""
        (batch, heads, *_), kind, geometry = call.shape, call.kind, call.kind.geometry
        shape = decode_shape(
            self._kernels.dialect,
            batch,
            heads,
            geometry.k_heads,
            (geometry.k_dim, geometry.v_dim),
            call.longest(reach, TILE),
            bases=1 + ("HAS_CODES" in kind.flags),
        )
        flags = [*kind.flags, *call.scores.softcap_flag]
        flags += ["STEP"] * call.writes + ["CHOSEN"] * bool(call.read_tokens)
        return PageReader(
            "decode",
            {"ROWS": shape.rows, "BLOCKS": shape.blocks, "PARTS": shape.parts},
            flags,
            (geometry.k_heads * shape.groups, shape.splits, batch * len(kind.bases)),
            LANES * shape.parts * shape.blocks,
            shape.splits,
            shape.tiles,
            kind.bases,
        )

    def _latent_reader(self, call: Call, reach: int) -> PageReader:
        """For one query token per sequence, and latents."""
        batch, heads, *_ = call.shape
        longest = call.longest(reach, LATENT_SIMDGROUPS)
        tiles, splits = latent_parts(self._kernels.dialect, batch, heads, longest)
        return PageReader(
            "latent",
            {"ROWS": LATENT_ROWS, "SIMDGROUPS": LATENT_SIMDGROUPS},
            [*call.kind.flags],
            (-(-heads // (LATENT_ROWS * LATENT_SIMDGROUPS)), splits, batch),
            LANES * LATENT_SIMDGROUPS,
            splits,
            tiles,
        )

    def _prefill_reader(self, call: Call) -> PageReader:
        """For several query tokens per sequence, whether or not pages hold them yet."""
        (batch, heads, steps, _), geometry = call.shape, call.kind.geometry
        threads = prefill_threads(self._kernels.dialect, geometry.v_dim)
        softcap = call.scores.softcap_flag
        reader = reader_of_steps(self._kernels.dialect, call.kind, softcap, threads)
        rows = steps * heads // geometry.k_heads
        return PageReader(
            reader.operation,
            reader.constants,
            [*reader.flags, *(["HAS_NEW_TOKENS"] if call.new_tokens else [])],
            (-(-rows // reader.rows), geometry.k_heads, batch),
            threads,
        )


def _parameters(call: Call, reader: PageReader, width: int) -> mx.array:
    (_, heads, steps, _), kind, scores = call.shape, call.kind, call.scores
    return parameters(
        slab_stride=kind.slab_stride,
        table_stride=width,
        kv_heads=kind.geometry.k_heads,
        steps=steps,
        gqa_group_size=heads // kind.geometry.k_heads,
        q_heads=heads,
        scale=scores.scale,
        softcap=scores.softcap,
        window=scores.window,
        causal=int(scores.hides_later),
        splits=reader.splits,
        split_tiles=reader.tiles,
        first_basis=reader.bases[0],
        bases=len(reader.bases),
        new_tokens=call.new_tokens,
        tokens=call.read_tokens,
    )
