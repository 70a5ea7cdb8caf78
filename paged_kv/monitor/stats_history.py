"""The history of pools: snapshots of a running process, or of the replay of a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paged_kv.monitor.process_view import PoolView, ProcessView
from paged_kv.pool.stats import PoolStats, no_stats


@dataclass(frozen=True)
class Sample:
    """The pools of a process or of a trace at one moment.

    Attributes:
        seconds: since the beginning.
        stats: the sum of all pools.
    """

    seconds: float
    stats: PoolStats


@dataclass(frozen=True)
class History:
    """Snapshots in the order of time.

    Attributes:
        title: the process or the trace.
        samples: the sums of all pools.
        peak: the pools with their maps, when most bytes were active.
    """

    title: str
    samples: tuple[Sample, ...]
    peak: tuple[PoolView, ...]

    @classmethod
    def of_views(cls, views: Iterable[ProcessView]) -> History:
        """The history of one process."""
        samples: list[Sample] = []
        peak: tuple[PoolView, ...] = ()
        most, began, title = -1, None, ""
        for view in views:
            began = view.time if began is None else began
            title = f"process {view.pid}: {view.command}"
            stats = total([pool.stats for pool in view.pools])
            samples.append(Sample(view.time - began, stats))
            if stats.bytes_active > most:
                most, peak = stats.bytes_active, view.pools
        return cls(title, tuple(samples), peak)


def total(pools: list[PoolStats]) -> PoolStats:
    """The sum of several pools, each with a budget of its own."""
    if not pools:
        return no_stats()
    budget = sum(pool.bytes_budget for pool in pools)
    return replace(sum(pools[1:], pools[0]), bytes_budget=budget)
