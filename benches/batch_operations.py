"""What rearranging a batch costs, beside mlx-lm's caches: python -m benches.batch_operations

A prompt cache of 4 layers with 4 heads of 64 in float16, and 8 rows of which the longest reaches
4,096 tokens in the last write. Each operation is what mlx-lm's BatchGenerator asks of every layer:

    merge      8 caches of one sequence each become a batch; the caches stay in use
    extend     a batch of 4 takes over another 4
    filter     a batch of 8 keeps every second row
    extract    one sequence of a batch of 8 becomes a cache of its own; the batch stays in use
    deepcopy   a copy of a batch of 8; the batch stays in use

All but merge begin with a batch that has written one token since it was merged, so that mlx-lm's
arrays have room for more. The next write appends one token to each row of the result.

Each phase is timed until its results are evaluated, as MLX is lazy. New bytes are MLX's peak of
active memory in the phase less the active memory before it; MLX's cache of freed memory is emptied
before each phase. Both caches take turns, and each figure is the median of its repetitions. Blocks
used are counted in a pool whose only other sequences are the 8 merged ones. Copied blocks are those
that the pool reports as copied on write: a sequence's last, partly filled block, if it is shared.
Ratios are mlx-lm's median over that of pages.
"""

import copy
import gc
import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from benches.results_file import write_result
from paged_kv import PagedKVCache, PagePool, Sequence

LAYERS, HEADS, DIM = 4, 4, 64
LENGTHS = [4_094 - 32 * row for row in range(8)]
POOL_BYTES = 1 << 30
REPETITIONS = 15

# The caches of all layers.
Caches = list[Any]
Figures = dict[str, float]


class Contiguous:
    """mlx-lm's KVCache and BatchKVCache."""

    def __init__(self) -> None:
        self.singles = [filled([KVCache() for _ in range(LAYERS)], count) for count in LENGTHS]

    def wait(self, caches: Caches) -> None:
        mx.eval([cache.state for cache in caches])

    def counts(self) -> Figures:
        return {}


class Paged:
    """Pages of a pool."""

    def __init__(self) -> None:
        self._pool = PagePool(LAYERS, max_bytes=POOL_BYTES)
        self.singles = [filled(self._new(), count) for count in LENGTHS]

    def _new(self) -> Caches:
        sequence = Sequence(self._pool)
        return [PagedKVCache(self._pool, layer, [sequence]) for layer in range(LAYERS)]

    def wait(self, caches: Caches) -> None:
        mx.eval([list(pages.slabs.values()) for pages in self._pool.groups[0].pages.values()])

    def counts(self) -> Figures:
        stats = self._pool.stats()
        return {
            "blocks_used": stats.blocks_used,
            "blocks_copied": stats.cow_copies,
            "bytes_mapped": stats.bytes_mapped,
        }


Subject = Contiguous | Paged


def filled(caches: Caches, count: int) -> Caches:
    """The caches, with `count` tokens written."""
    write(caches, rows=1, count=count)
    mx.eval([cache.state for cache in caches])
    return caches


def write(caches: Caches, rows: int, count: int = 1) -> Caches:
    """The caches, with `count` more tokens in each row of each layer."""
    keys = mx.ones((rows, HEADS, count, DIM), dtype=mx.float16)
    for cache in caches:
        cache.update_and_fetch(keys, keys)
    return caches


def merged(singles: list[Caches]) -> Caches:
    return [caches[0].merge(list(caches)) for caches in zip(*singles, strict=True)]


def running(subject: Subject, rows: slice) -> Caches:
    """A batch of these rows that has written one token."""
    caches = merged(subject.singles[rows])
    write(caches, rows=len(subject.singles[rows]))
    subject.wait(caches)
    return caches


def extended(batches: tuple[Caches, Caches]) -> Caches:
    for cache, other in zip(*batches, strict=True):
        cache.extend(other)
    return batches[0]


def filtered(caches: Caches) -> Caches:
    for cache in caches:
        cache.filter(list(range(0, len(LENGTHS), 2)))
    return caches


def extracted(caches: Caches) -> Caches:
    return [cache.extract(3) for cache in caches]


ALL, FIRST, SECOND = slice(None), slice(0, 4), slice(4, 8)
# What an operation begins with, the operation, and the rows of its result.
OPERATIONS: dict[str, tuple[Callable[[Subject], Any], Callable[[Any], Caches], int]] = {
    "merge": (lambda subject: subject.singles, merged, 8),
    "extend": (lambda subject: (running(subject, FIRST), running(subject, SECOND)), extended, 8),
    "filter": (lambda subject: running(subject, ALL), filtered, 4),
    "extract": (lambda subject: running(subject, ALL), extracted, 1),
    "deepcopy": (lambda subject: running(subject, ALL), copy.deepcopy, 8),
}


def measure(subject: Subject, operation: str) -> dict[str, Figures]:
    """One run of an operation and of the write behind it."""
    begin, act, rows = OPERATIONS[operation]
    # Held to the end: an operation is not spared a copy because nobody needs the original.
    start = begin(subject)
    phases: dict[str, Figures] = {}
    caches, phases["operation"] = timed(subject, lambda: act(start))
    _, phases["next_write"] = timed(subject, lambda: write(caches, rows))
    return phases


def timed(subject: Subject, act: Callable[[], Caches]) -> tuple[Caches, Figures]:
    gc.collect()
    mx.clear_cache()
    before, held = subject.counts(), mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    caches = act()
    subject.wait(caches)
    seconds = time.perf_counter() - began
    new_bytes = max(mx.get_peak_memory() - held, 0)
    after = subject.counts()
    changes = {f"{name}_change": after[name] - before[name] for name in before}
    return caches, {"seconds": seconds, "new_bytes": new_bytes, **before, **changes}


def medians(runs: list[dict[str, Figures]]) -> dict[str, Figures]:
    return {
        phase: {name: median(run[phase][name] for run in runs) for name in figures}
        for phase, figures in runs[0].items()
    }


def compare(contiguous: Contiguous, paged: Paged, operation: str) -> dict[str, Any]:
    """The medians of both caches, measured in turns, and their ratios."""
    # The first run of each finds nothing mapped and nothing compiled, and is not counted.
    pairs = [
        (measure(contiguous, operation), measure(paged, operation)) for _ in range(REPETITIONS + 1)
    ][1:]
    stock, ours = (medians(list(runs)) for runs in zip(*pairs, strict=True))
    ratios = {
        phase: {
            name: stock[phase][name] / ours[phase][name] if ours[phase][name] else None
            for name in ("seconds", "new_bytes")
        }
        for phase in stock
    }
    return {"mlx_lm": stock, "paged": ours, "ratios": ratios}


def main() -> None:
    # Nothing attends here, and the pool would warn that nothing reads its pages.
    logging.getLogger("paged_kv").setLevel(logging.ERROR)
    contiguous, paged = Contiguous(), Paged()
    figures = {
        "layers": LAYERS,
        "heads": HEADS,
        "dim": DIM,
        "dtype": "float16",
        "tokens": max(LENGTHS) + 2,
        "lengths": LENGTHS,
        "pool_bytes": POOL_BYTES,
        "repetitions": REPETITIONS,
        "operations": {each: compare(contiguous, paged, each) for each in OPERATIONS},
    }
    write_result("batch_operations", figures)


if __name__ == "__main__":
    main()
