"""Plans attention, keeps the plans, and runs their launches: at most one for pages that sequences
share, one for the sequences' own pages, and one that merges partial results."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import BoundSlabs, PageKind, Scores
from paged_kv.kernels.gpu.kernels import GpuKernels, Launch
from paged_kv.kernels.gpu.order import Order
from paged_kv.kernels.gpu.prefix import Groups, MatrixReader, groups_of, prefix_launch
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.tables import Tables


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
            step: new keys and values, and chosen runs, if the kernel takes some.
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


class Planner:
    """Plans an attention, and keeps its latest plans."""

    _plan_of: Callable[..., LaunchPlan]
    _reader_of: "ClassVar[staticmethod[[str, PageKind], MatrixReader]]"

    def __init__(self, kernels: GpuKernels, order: Order) -> None:
        self._kernels = kernels
        self._order = order
        self._plan = lru_cache(maxsize=256)(self._plan_of)

    def _groups_of(self, tables: Tables, kind: PageKind, queries: tuple[int, ...]) -> Groups | None:
        """The groups that read shared pages for queries [B, q_heads, S, k_dim], if any do."""
        if tables.groups is None:
            return None
        reader = self._reader_of(self._kernels.dialect, kind)
        return groups_of(tables.groups, reader, kind, queries)

    def _prefix(
        self, groups: Groups | None, kind: PageKind, heads: int, steps: int, scores: Scores
    ) -> Launch | None:
        """The launch of these groups."""
        if groups is None:
            return None
        reader = self._reader_of(self._kernels.dialect, kind)
        return prefix_launch(self._kernels, reader, groups, kind, heads, steps, scores)


class DecodeArguments(NamedTuple):
    """The arguments that the launches of several layers share in a step of one token per sequence.

    Attributes:
        writes: whether the kernel also writes the step.
        read_tokens: how many tokens of a sequence it reads at most, chosen ones; 0 for all.
    """

    kind: PageKind
    heads: int
    scores: Scores
    writes: bool = False
    read_tokens: int = 0


class StepPlanner(Planner):
    """Plans steps of one token per sequence."""

    def _plan_for(
        self, tables: Tables, key: tuple[Any, ...], queries: tuple[int, ...]
    ) -> LaunchPlan:
        """The plan for these tables, kept with them.

        Args:
            key: the fields of `DecodeArguments`.
        """
        arguments = DecodeArguments(*key)
        # Sequences that share pages choose differently.
        shares = not arguments.read_tokens
        groups = self._groups_of(tables, arguments.kind, queries) if shares else None
        reach = tables.reach if groups is None else tables.own_reach
        plan = tables.plans[key] = self._plan(arguments, reach, *tables.array.shape, groups)
        return plan
