"""Plans and runs attention to pages: of one token per sequence, of several, and to latents.

One launch reads the pages of each sequence. Another merges its results where it has several for a
query. One more, before these, reads the pages that sequences share, once for each group of
sequences (kernels/pages/tables.py), from which come the query rows of its threadgroups. A
step that reads chosen tokens is planned as one of so short a context. All inputs but a layer's own
arrays are the same in all layers of a kind, and are made once per step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.gpu.arrays import (
    BoundSlabs,
    PageKind,
    Scores,
    inputs_of,
    parameters,
    scores_of,
)
from paged_kv.kernels.gpu.kernels import DONE, GpuKernels, Launch, Order, Output
from paged_kv.kernels.pages.attention_metadata import Attention, Unwritten
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.self_test import Check, Probe
from paged_kv.kernels.pages.tables import SEQUENCES, Tables

Groups = tuple[int, int]
"""How many groups read shared pages, and how many places their results have."""


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

    @property
    def rows(self) -> int:
        """Query rows of a sequence and KV head."""
        return self.shape[1] // self.kind.geometry.k_heads * self.shape[2]

    def longest(self, reach: int, tile: int) -> int:
        """The most tokens of a sequence that are read, if tables have that reach."""
        longest = min(reach, self.read_tokens or reach)
        return min(longest, self.scores.window) + tile if self.scores.window else longest


class Reader(NamedTuple):
    """A kernel that reads pages: those of each sequence, or those that a group shares.

    Attributes:
        operation: see `GpuKernels.launch`, as for `constants` and `flags`.
        threads: of a threadgroup.
        rows: query rows of a threadgroup, if it multiplies on matrix units.
        groups: threadgroups.
        splits: parts of a context.
        tiles: of a part.
    """

    operation: str
    constants: dict[str, int]
    flags: list[str]
    threads: int
    rows: int = 0
    groups: tuple[int, int, int] = (0, 0, 0)
    splits: int = 1
    tiles: int = 0


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
    """Attention of any number of query tokens per sequence.

    Args:
        kernels: the kernels.
        order: orders them.
        certified: given a check, what a plan's kernels are made within; raises WrongKernel.
    """

    def __init__(
        self,
        kernels: GpuKernels,
        order: Order,
        certified: Callable[[Callable[[Backend], Check]], AbstractContextManager[None]],
    ) -> None:
        self._kernels = kernels
        self._order = order
        self._certified = certified
        self._plan = lru_cache(maxsize=256)(self._certified_plan)

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
        if tables.groups is not None and not call.read_tokens and self._is_grouped(call):
            groups = tables.groups.shape
        reach = tables.reach if groups is None else tables.own_reach
        plan = tables.plans[key] = self._plan(call, reach, tables.array.shape[1], groups)
        return plan

    def _certified_plan(
        self, call: Call, reach: int, width: int, groups: Groups | None
    ) -> LaunchPlan:
        with self._certified(partial(_check, call, reach, groups is not None)):
            return self._plan_of(call, reach, width, groups)

    def _plan_of(self, call: Call, reach: int, width: int, groups: Groups | None) -> LaunchPlan:
        """The plan for tables [B, width] of that reach."""
        (batch, heads, steps, _), geometry = call.shape, call.kind.geometry
        reader, dtype = self._reader(call, reach), geometry.k_dtype
        params = _parameters(call, reader, width)
        dim = geometry.k_dim if call.is_latent else geometry.v_dim
        output = Output((batch, heads, steps, dim), dtype)
        sinks = [] if call.scores.sinks is None else ["SINKS"]
        if reader.splits == 1 and groups is None and not call.is_latent:
            attend = self._launch(call, reader, ["WHOLE", *sinks], [output, DONE])
            return LaunchPlan(attend, None, params)
        after_prefix, prefix = [], None
        if groups is not None:
            after_prefix, prefix = ["AFTER_PREFIX"], self._prefix(call, groups, dim)
        results = partial_outputs(batch * heads * steps * reader.splits, dim)
        attend = self._launch(call, reader, ["PARTIAL", *after_prefix], results)
        merge = self._kernels.launch(
            "merge",
            dtype,
            {"V_DIM": dim},
            [*sinks, *after_prefix],
            (heads * steps, batch, 1),
            tuning.LANES,
            [output],
        )
        return LaunchPlan(attend, merge, params, prefix)

    def _prefix(self, call: Call, groups: Groups, dim: int) -> Launch:
        """Attention of groups to the pages that they share. Its results are float32 [places *
        q_heads * S, dim], weighted values in the plain basis, and float32 [places * q_heads * S,
        2]."""
        (count, places), reader = groups, self._group_reader(call)
        _, heads, steps, _ = call.shape
        blocks = -(-SEQUENCES * call.rows // reader.rows)
        reader = reader._replace(groups=(blocks, call.kind.geometry.k_heads, count))
        return self._launch(call, reader, [], partial_outputs(places * heads * steps, dim))

    def _launch(
        self, call: Call, reader: Reader, flags: list[str], outputs: list[Output]
    ) -> Launch:
        return self._kernels.launch(
            reader.operation,
            call.kind.geometry.k_dtype,
            call.kind.dims | reader.constants,
            [*reader.flags, *flags],
            reader.groups,
            reader.threads,
            outputs,
        )

    def _is_grouped(self, call: Call) -> bool:
        """Whether groups read shared pages: not where each sequence is to read all of its pages,
        because no threadgroup holds twice as many queries as one that reads them for a sequence."""
        rows = self._group_reader(call).rows
        alone = tuning.LATENT_ROWS * tuning.LATENT_SIMDGROUPS if call.is_latent else rows
        return 2 * min(call.rows, alone) <= rows

    def _group_reader(self, call: Call) -> Reader:
        """For groups of sequences."""
        geometry, dialect = call.kind.geometry, self._kernels.dialect
        if call.is_latent:
            flags = [*call.kind.flags, "IN_GROUPS", "OF_LATENTS"]
            threads = tuning.WIDE_THREADS[dialect]
            return self._matrix_reader("latent", threads, geometry.k_dim, flags)
        threads = tuning.group_threads(dialect, geometry.k_dim, geometry.v_dim)
        return self._prefill_reader(call, threads, ["IN_GROUPS", "PARTIAL"])

    def _prefill_reader(self, call: Call, threads: int, flags: list[str]) -> Reader:
        """For several query tokens per sequence, whether or not pages hold them yet."""
        v_dim = call.kind.geometry.v_dim
        flags = [*call.kind.flags, *call.scores.softcap_flag, *flags]
        flags += ["WIDE"] if tuning.column_sharers(self._kernels.dialect, v_dim) > 1 else []
        return self._matrix_reader("prefill", threads, v_dim, flags)

    def _matrix_reader(
        self, operation: str, threads: int, columns: int, flags: list[str]
    ) -> Reader:
        """Reads pages on matrix units, for query rows of one sequence or of a group."""
        dialect = self._kernels.dialect
        sharers = tuning.column_sharers(dialect, columns)
        constants = {"THREADS": threads, "SHARERS": sharers}
        rows = tuning.matrix_rows(dialect, threads, sharers)
        return Reader(operation, constants, flags, threads, rows)

    def _reader(self, call: Call, reach: int) -> Reader:
        """For each sequence."""
        if call.is_latent:
            return self._latent_reader(call, reach)
        if call.shape[2] == 1 and not call.new_tokens:
            return self._decode_reader(call, reach)
        geometry = call.kind.geometry
        threads = tuning.prefill_threads(self._kernels.dialect, geometry.v_dim)
        flags = ["HAS_NEW_TOKENS"] if call.new_tokens else []
        reader = self._prefill_reader(call, threads, flags)
        groups = -(-call.rows // reader.rows), geometry.k_heads, call.shape[0]
        return reader._replace(groups=groups)

    def _decode_reader(self, call: Call, reach: int) -> Reader:
        """For one query token per sequence."""
        (batch, heads, *_), kind, geometry = call.shape, call.kind, call.kind.geometry
        shape = tuning.decode_shape(
            self._kernels.dialect,
            batch,
            heads,
            geometry.k_heads,
            (geometry.k_dim, geometry.v_dim),
            call.longest(reach, tuning.TILE),
            bases=1 + ("HAS_CODES" in kind.flags),
        )
        ahead = tuning.values_ahead(self._kernels.dialect, geometry.v_dim)
        flags = [*kind.flags, *call.scores.softcap_flag]
        flags += ["STEP"] * call.writes + ["CHOSEN"] * bool(call.read_tokens)
        return Reader(
            "decode",
            {"ROWS": shape.rows, "BLOCKS": shape.blocks, "PARTS": shape.parts, "AHEAD": ahead},
            flags,
            tuning.LANES * shape.parts * shape.blocks,
            groups=(geometry.k_heads * shape.groups, shape.splits, batch),
            splits=shape.splits,
            tiles=shape.tiles,
        )

    def _latent_reader(self, call: Call, reach: int) -> Reader:
        """For one query token per sequence, and latents."""
        batch, heads, *_ = call.shape
        longest = call.longest(reach, tuning.LATENT_SIMDGROUPS)
        tiles, splits = tuning.latent_parts(self._kernels.dialect, batch, heads, longest)
        return Reader(
            "latent",
            {"ROWS": tuning.LATENT_ROWS, "SIMDGROUPS": tuning.LATENT_SIMDGROUPS},
            [*call.kind.flags],
            tuning.LANES * tuning.LATENT_SIMDGROUPS,
            groups=(-(-heads // (tuning.LATENT_ROWS * tuning.LATENT_SIMDGROUPS)), splits, batch),
            splits=splits,
            tiles=tiles,
        )


def _parameters(call: Call, reader: Reader, width: int) -> mx.array:
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
        new_tokens=call.new_tokens,
        tokens=call.read_tokens,
    )


def _check(call: Call, reach: int, shares: bool, backend: Backend) -> Check:
    """Of a call that needs the same kernels. Only steps of one token divide long contexts, by the
    numbers of sequences and KV heads."""
    (batch, heads, steps, _), kind, scores = call.shape, call.kind, call.scores
    longest = max(reach - 76, call.read_tokens + 44)
    probe = Probe(kind.geometry, kind.formats, heads, batch, longest, shares)
    if steps > 1 or call.new_tokens or call.is_latent:
        probe = replace(probe, batch=min(batch, 2), longest=948).on_few_heads()
    return probe.attend(
        backend,
        steps=steps if shares else min(steps, 20),
        window=scores.window or None,
        softcap=2.0 if scores.softcap else None,
        sinks=scores.sinks,
        read_tokens=call.read_tokens or None,
        writes=call.writes,
        new_tokens=call.new_tokens > 0,
        is_latent=call.is_latent,
    )


def partial_outputs(results: int, dim: int) -> list[Output]:
    """Of a kernel whose results are merged: weighted values, then maxima and sums of weights."""
    return [Output((results, dim), mx.float32), Output((results, 2), mx.float32), DONE]
