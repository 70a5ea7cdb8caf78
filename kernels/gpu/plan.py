"""Runs the launches of an attention: at most one for pages that sequences share, one for the
sequences' own pages, and one that merges partial results.

The kernel for shared pages is that of prefill, in whose threadgroups the query rows of a KV head
come from several sequences (kernels/pages/prefix_groups.py).
"""

from typing import NamedTuple

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import BoundSlabs, PageKind, Scores
from paged_kv.kernels.gpu.kernels import DONE, GpuKernels, Launch, Output, launch_of
from paged_kv.kernels.gpu.order import Order
from paged_kv.kernels.gpu.tuning import LANES, SIMDGROUP_ROWS, group_threads
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.prefix_groups import SEQUENCES, PrefixGroups
from paged_kv.kernels.pages.tables import Tables

Groups = tuple[int, int]
"""How many groups read shared pages, and how many places their results have."""


class Plan(NamedTuple):
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

    def run_and_merge(
        self,
        order: Order,
        pages: LayerMemory,
        slabs: BoundSlabs,
        tables: Tables,
        queries: list[mx.array],
        step: list[mx.array],
        sinks: list[mx.array],
    ) -> mx.array:
        """The output, of a plan that merges.

        Args:
            queries: one array, or two of latent attention.
            step: new keys and values, if the kernel takes some.
            sinks: the sinks, if there are some.
        """
        assert self.merge is not None
        of_pages = [*slabs.inputs, tables.array, self.params]
        shared: list[mx.array] = []
        if self.prefix is not None:
            assert tables.groups is not None
            inputs = [*queries, tables.groups.array, *of_pages]
            shared = [*order.run(pages, self.prefix, inputs)[:-1], tables.array]
        partials, measures, _ = order.run(pages, self.attend, [*queries, *step, *of_pages])
        return self.merge(inputs=[partials, measures, *shared, *sinks, self.params])[0]


def partial_outputs(results: int, v_dim: int) -> list[Output]:
    """Of a kernel whose results are merged: weighted values, then maxima and sums of weights."""
    return [Output((results, v_dim), mx.float32), Output((results, 2), mx.float32), DONE]


def groups_of(
    groups: PrefixGroups, kernels: GpuKernels, kind: PageKind, queries: tuple[int, ...]
) -> Groups | None:
    """For queries [B, q_heads, S, k_dim]; None if each sequence is to read all of its pages,
    because no threadgroup holds the queries of two sequences."""
    rows = queries[1] // kind.geometry.k_heads * queries[2]
    return groups.shape if 2 * rows <= _rows(kernels, kind) else None


def prefix_launch(
    kernels: GpuKernels, groups: Groups, kind: PageKind, heads: int, steps: int, scores: Scores
) -> Launch:
    """Attention of groups to the pages that they share. Its results are float32 [places * q_heads *
    S, v_dim], weighted values in the plain basis, and float32 [places * q_heads * S, 2]."""
    geometry, threads = kind.geometry, _threads(kernels, kind)
    constants = {"K_DIM": geometry.k_dim, "V_DIM": geometry.v_dim, "THREADS": threads}
    flags = [*kind.flags, *scores.softcap_flag, "IN_GROUPS", "PARTIAL"]
    count, places = groups
    rows = SEQUENCES * heads // geometry.k_heads * steps
    return launch_of(
        kernels.kernel("prefill", geometry.k_dtype, constants, flags),
        (-(-rows // _rows(kernels, kind)), geometry.k_heads, count),
        threads,
        partial_outputs(places * heads * steps, geometry.v_dim),
    )


def _threads(kernels: GpuKernels, kind: PageKind) -> int:
    return group_threads(kernels.dialect, kind.geometry.k_dim, kind.geometry.v_dim)


def _rows(kernels: GpuKernels, kind: PageKind) -> int:
    """The query rows of a threadgroup."""
    return _threads(kernels, kind) // LANES * SIMDGROUP_ROWS[kernels.dialect]
