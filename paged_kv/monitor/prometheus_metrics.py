"""Prometheus metrics of a process's pools. Names follow vLLM's where it has them.

Needs the extra "metrics". Labels are numbers of pools, names of formats and states, and reasons.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paged_kv.monitor.processes import ProcessView
from paged_kv.pool.stats import COLUMNS


def metrics_text(view: ProcessView, *others: Collector) -> bytes:
    """The metrics of all pools and of other collectors, in Prometheus's text format."""
    registry = CollectorRegistry()
    for collector in (_Collector(view), *others):
        registry.register(collector)
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, view: ProcessView) -> None:
        self._pools = view.pools

    def collect(self) -> Iterator[Metric]:
        labels = ["pool", "model"]
        for column in COLUMNS:
            if column.metric is None:
                continue
            family = CounterMetricFamily if column.is_counter else GaugeMetricFamily
            by = [*labels, column.by] if column.by else labels
            metric = family(f"paged_kv:{column.metric}", column.meaning, labels=by)
            for pool in self._pools:
                for part, number in column.parts(pool.stats).items():
                    metric.add_metric([str(pool.number), pool.name, *part], number)
            yield metric
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
                    blocks.add_metric([str(pool.number), pool.name, state, page_format], count)
        yield blocks
