"""What a process' pools hold as metrics of Prometheus. Names follow vLLM's where it has them.

Needs the extra "metrics". Labels are numbers of pools, names of formats and states, and reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paged_kv.monitor.process_view import PoolView, ProcessView
from paged_kv.pool.stats import PoolStats

_GAUGES: dict[str, tuple[str, Callable[[PoolStats], float]]] = {
    "kv_cache_usage_perc": ("Share of the budget that used pages take, 0 to 1", lambda s: s.usage),
    "kv_budget_bytes": ("The most bytes that may be mapped", lambda s: s.bytes_budget),
    "kv_mapped_bytes": ("Bytes of all slabs", lambda s: s.bytes_mapped),
    "kv_active_bytes": ("Bytes of pages in use", lambda s: s.bytes_active),
    "kv_allocated_bytes": ("Bytes of rows of live tokens", lambda s: s.bytes_allocated),
    "kv_retained_bytes": ("Bytes of cached pages", lambda s: s.bytes_retained),
    "kv_tail_bytes": ("Bytes of rows behind last tokens", lambda s: s.bytes_tail),
    "kv_ring_slack_bytes": (
        "Bytes of rows that windows have left",
        lambda s: s.bytes_out_of_window,
    ),
    "kv_stranded_bytes": ("Bytes of free pages in slabs in use", lambda s: s.bytes_stranded),
    "kv_compactable_bytes": ("What compact() would give back", lambda s: s.bytes_compactable),
    "kv_metadata_bytes": ("Bytes of the bookkeeping, about", lambda s: s.bytes_metadata),
    "kv_sharing_factor": ("Table entries for each used block", lambda s: s.sharing_factor),
    "kv_block_tables": ("Sequences, once for each group", lambda s: s.tables),
}
_COUNTERS: dict[str, tuple[str, Callable[[PoolStats], float]]] = {
    "prefix_cache_queries": ("Tokens of prompts looked up", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Tokens of prompts found", lambda s: s.prefix_hits),
    "cow_copies": ("Blocks copied because a shared one was written", lambda s: s.cow_copies),
    "allocation_failures": ("Times the pool was exhausted", lambda s: s.allocation_failures),
    "gather_fallbacks": ("Gathers for attention that reads no pages", lambda s: s.gather_fallbacks),
    "kernel_fallbacks": ("Calls that no kernel could take", lambda s: s.kernel_fallbacks),
}


def metrics_text(view: ProcessView, *others: Collector) -> bytes:
    """The metrics of all pools, and what others collect, in Prometheus' text format."""
    registry = CollectorRegistry()
    for collector in (_Collector(view), *others):
        registry.register(collector)
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, view: ProcessView) -> None:
        self._pools = view.pools

    def collect(self) -> Iterator[Metric]:
        labels = ["pool", "model"]
        for name, (meaning, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"paged_kv:{name}", meaning, labels=labels)
            for pool in self._pools:
                gauge.add_metric(_of(pool), value(pool.stats))
            yield gauge
        for name, (meaning, value) in _COUNTERS.items():
            counter = CounterMetricFamily(f"paged_kv:{name}", meaning, labels=labels)
            for pool in self._pools:
                counter.add_metric(_of(pool), value(pool.stats))
            yield counter
        yield self._blocks(labels)
        yield self._evictions(labels)

    def _blocks(self, labels: list[str]) -> Metric:
        blocks = GaugeMetricFamily(
            "paged_kv:kv_blocks", "Blocks by state and format", labels=[*labels, "state", "format"]
        )
        for pool in self._pools:
            for state, by_format in (
                ("used", pool.stats.blocks_by_format),
                ("cached", pool.stats.cached_by_format),
                ("free", pool.stats.free_by_format),
            ):
                for page_format, count in by_format.items():
                    blocks.add_metric([*_of(pool), state, page_format], count)
        return blocks

    def _evictions(self, labels: list[str]) -> Metric:
        evictions = CounterMetricFamily(
            "paged_kv:evictions",
            "Blocks' worth of cached tokens let go",
            labels=[*labels, "reason"],
        )
        for pool in self._pools:
            for reason, count in pool.stats.evictions.items():
                evictions.add_metric([*_of(pool), reason], count)
        return evictions


def _of(pool: PoolView) -> list[str]:
    return [str(pool.number), pool.name]
