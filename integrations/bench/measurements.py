"""What `paged-kv bench` measures: one function each, in the order of the report."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from paged_kv.integrations.bench.cache_pairs import CachePairs, Caches
from paged_kv.integrations.bench.turns import (
    Measurement,
    Skipped,
    compared,
    compared_clocks,
    seconds,
)
from paged_kv.kernels.pages.memory import recommended_bytes
from paged_kv.sizes import counted

Outcome = Measurement | Skipped

_LONG = 4096
_SUFFIX = 32
_CHUNK = 512


@dataclass(frozen=True)
class BenchSizes:
    """How much to measure.

    Attributes:
        contexts: of decoding, in tokens.
        rows: of decoding.
        prompt: tokens of a prefill.
        prefix: tokens of a fork and of a shared prefix.
        part_s: about how long one measurement may take, in seconds.
    """

    contexts: tuple[int, ...] = (256, _LONG, 32_768)
    rows: tuple[int, ...] = (1, 8)
    prompt: int = 512
    prefix: int = _LONG
    part_s: float = 12.0


WHOLE = BenchSizes()
QUICK = BenchSizes(contexts=(256, _LONG), prefix=1024, part_s=3.0)


def parts(pairs: CachePairs, plan: BenchSizes) -> list[tuple[str, Callable[[], Iterator[Outcome]]]]:
    """The names of all parts, and what measures them."""
    decodes = [
        (f"decode at {context:,}, {counted(rows, 'row')}", context, rows)
        for context in plan.contexts
        for rows in plan.rows
    ]
    return [
        *(
            (name, lambda args=(name, context, rows): decode(pairs, plan, *args))
            for name, context, rows in decodes
        ),
        ("prefill", lambda: prefill(pairs, plan)),
        ("fork", lambda: fork(pairs, plan)),
        ("shared prefix", lambda: shared_prefix(pairs, plan)),
        ("host time", lambda: host_time(pairs, plan)),
    ]


def decode(
    pairs: CachePairs, plan: BenchSizes, name: str, context: int, rows: int
) -> Iterator[Outcome]:
    """A step of one token a row, and the memory of keys and values."""
    needed = 2 * context * rows * pairs.bytes_per_token  # of both kinds
    if needed > recommended_bytes():
        yield Skipped(name, f"it needs {needed / 1e9:.1f} GB for keys and values")
        return
    gc.collect()
    before = pairs.factory.stats().bytes_held
    try:
        stock, paged = pairs.filled(context, rows)
    except ValueError as error:
        yield Skipped(name, str(error))
        return
    yield compared(
        name, lambda: pairs.step(stock, rows), lambda: pairs.step(paged, rows), plan.part_s
    )
    held = sum(cache.nbytes for cache in stock)
    ours = pairs.factory.stats().bytes_held - before
    yield Measurement(f"{name}: keys and values held", "bytes", held, ours, held / max(1, ours))


def prefill(pairs: CachePairs, plan: BenchSizes) -> Iterator[Outcome]:
    """A prompt on empty caches, and the peak of memory beside what was there."""

    def work(kind: int) -> Callable[[], None]:
        return lambda: pairs.read(pairs.new()[kind], plan.prompt)

    name = f"prefill of {plan.prompt:,}"
    yield compared(name, work(0), work(1), plan.part_s)
    stock, ours = (float(_peak(work(kind))) for kind in (0, 1))
    yield Measurement(f"{name}: peak memory", "bytes", stock, ours, stock / max(1.0, ours))


def fork(pairs: CachePairs, plan: BenchSizes) -> Iterator[Outcome]:
    """A copy of a cache, and its first token."""
    both = pairs.filled(plan.prefix)

    def work(kind: int) -> Callable[[], None]:
        return lambda: pairs.step(copy.deepcopy(both[kind]), 1)

    yield compared(f"fork of {plan.prefix:,} and a token", work(0), work(1), plan.part_s)


def shared_prefix(pairs: CachePairs, plan: BenchSizes) -> Iterator[Outcome]:
    """A prompt that begins like an earlier one, until its first token: mlx-lm copies the cache that
    its server has kept, pages are found by their tokens."""
    name = f"prompt of {plan.prefix + _SUFFIX:,} whose first {plan.prefix:,} are cached"
    tokens = [1] * plan.prefix
    stock, paged = pairs.new()
    chunk = min(_CHUNK, plan.prefix)
    taken = 2 * seconds(lambda: pairs.read(pairs.new()[0], chunk)) * plan.prefix / chunk
    if taken > 2 * plan.part_s:
        yield Skipped(name, f"to read the prefix twice takes about {taken:.0f} s")
        return
    for caches in (stock, paged):
        for start in range(0, plan.prefix, chunk):
            pairs.read(caches, min(chunk, plan.prefix - start))
    pairs.factory.insert_cache(tokens, paged)

    def find() -> None:
        found, cached = pairs.factory.fetch_cache([*tokens, *[1] * _SUFFIX])
        pairs.read(found, plan.prefix + _SUFFIX - cached)

    yield compared(name, lambda: pairs.read(copy.deepcopy(stock), _SUFFIX), find, plan.part_s)


def host_time(pairs: CachePairs, plan: BenchSizes) -> Iterator[Outcome]:
    """The time that Python builds a step for, a layer: a GPU waits for it."""
    name = "host time of a decode step at 256, a layer"
    backend = pairs.factory.stats().backend
    if backend not in ("metal", "cuda"):
        yield Skipped(name, f"the {backend} backend computes while a step is built")
        return
    stock, paged = pairs.filled(256)
    token = mx.zeros((1, 1), dtype=mx.int32)

    def build(caches: Caches) -> float:
        began = time.perf_counter()
        logits = pairs.model(token, cache=caches)
        built = time.perf_counter()
        mx.eval(logits)
        return (built - began) / len(caches)

    yield compared_clocks(name, lambda: build(stock), lambda: build(paged), plan.part_s)


def _peak(work: Callable[[], None]) -> int:
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before
