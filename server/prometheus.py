"""Prometheus metrics of a server. Names follow vLLM's where it has them.

Needs the extra "metrics".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from paged_kv.monitor import prometheus_metrics
from paged_kv.monitor.processes import ProcessView
from paged_kv.server.completions.service import Service
from paged_kv.server.engine.server_metrics import Histogram
from paged_kv.server.status_page import choices_in


def metrics_text(service: Service, view: ProcessView) -> bytes:
    """The metrics of all pools and of the server, in Prometheus's text format."""
    return prometheus_metrics.metrics_text(view, _Collector(service))


class _Collector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        jobs, counted = list(self._service.thread.jobs.values()), self._service.metrics
        running = choices_in(jobs, "running")
        waiting = choices_in(jobs, "waiting")
        yield _gauge("num_requests_running", "Choices that are computed", running)
        yield _gauge("num_requests_waiting", "Choices that wait for their turn", waiting)
        yield _counter("num_requests_refused", "Requests refused with 503", counted.refused)
        age_s = self._service.thread.watch.age_s
        yield _gauge("step_age_seconds", "Time that the present step has taken", age_s)
        yield _by_label("http_requests", "Requests for completions", "status", counted.answered)
        yield _counter("prompt_tokens", "Tokens of prompts", counted.prompt_tokens)
        yield _counter("prompt_tokens_cached", "Those not computed", counted.cached_tokens)
        yield _counter("generation_tokens", "Tokens generated", counted.generation_tokens)
        yield _counter("prepared_tokens", "Computed before asked for", counted.prepared_tokens)
        yield _counter("prepared_tokens_found", "Those found later", counted.prepared_found)
        yield _counter("prepared_tokens_unused", "Those for nothing", counted.prepared_unused)
        yield _by_label(
            "request_success", "Choices that ended", "finished_reason", counted.finished
        )
        yield _histogram("time_to_first_token_seconds", counted.first_token)
        yield _histogram("request_time_per_output_token_seconds", counted.output_token)
        yield _histogram("e2e_request_latency_seconds", counted.whole_request)
        yield _gauge("mlx_active_bytes", "Bytes that MLX holds", mx.get_active_memory())
        kept = mx.get_cache_memory()
        yield _gauge("mlx_cache_bytes", "Bytes that MLX has freed and keeps", kept)
        yield _gauge("mlx_peak_bytes", "Most that mlx_active_bytes was", mx.get_peak_memory())
        yield from self._of_ranks()

    def _of_ranks(self) -> Iterator[Metric]:
        """The bytes of each process, where several share the model."""
        memory_of = self._service.thread.provider.ranks.memory
        if not memory_of:
            return
        metric = GaugeMetricFamily(
            "paged_kv:rank_bytes", "Bytes of all pools of a rank", labels=["rank", "state"]
        )
        for rank, memory in memory_of.items():
            for state, nbytes in memory._asdict().items():
                metric.add_metric([str(rank), state], nbytes)
        yield metric


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"paged_kv:{name}", meaning, value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"paged_kv:{name}", meaning, value)


def _by_label(name: str, meaning: str, label: str, counts: Mapping[Any, int]) -> Metric:
    metric = CounterMetricFamily(f"paged_kv:{name}", meaning, labels=[label])
    for value, count in sorted(dict(counts).items()):
        metric.add_metric([str(value)], count)
    return metric


def _histogram(name: str, counted: Histogram) -> Metric:
    return HistogramMetricFamily(
        f"paged_kv:{name}", "Seconds", buckets=counted.buckets(), sum_value=counted.sum
    )
