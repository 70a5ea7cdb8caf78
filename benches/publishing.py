"""Monitoring overhead of the watched process, and of a look: python -m benches.publishing

stdlib-llama decodes a batch of 8, in turns with and without the thread that publishes the pool's
statistics at its default interval, and once more without. Ratios are medians of those within a
turn; the ratio of the two sides without the thread is the noise. The thread's own processor time is
measured too, which other load does not change: the time of one look, and so its share of the
processor. Last, the times of a snapshot with 10,000 used blocks, and of reserving a token with and
without a trace.
"""

import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import thread_time
from timeit import repeat

# The thread that every process has is left out: this bench starts one of its own.
os.environ["PAGED_KV_PUBLISH"] = "0"

from benches.openblas import BLAS

# isort: split
import mlx.core as mx

from benches.results_file import write_result
from benches.whole_model import filled, stdlib_llama, step
from paged_kv import PagedCacheFactory
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.events import NO_EVENTS
from paged_kv.allocator.writes import reserve
from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.monitor.pool_views import view_process
from paged_kv.monitor.publisher import INTERVAL_S, SLEEPS, Publisher
from paged_kv.pool.page_pool import open_pools
from paged_kv.trace.recorder import TracedPool, TraceFile

BATCH, CONTEXT, STEPS, REPETITIONS = 8, 1024, 20, 61
BLOCKS, RESERVATIONS = 10_000, 200


def main() -> None:
    mx.random.seed(0)
    model = stdlib_llama()
    factory = PagedCacheFactory(model, max_bytes=1 << 30)
    decode_one = step(model, filled(model, factory.make_cache(), BATCH, CONTEXT), BATCH)

    def decode() -> None:
        for _ in range(STEPS):
            decode_one()

    with TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder

        def decode_looked_at() -> None:
            publisher = Publisher(lambda: view_process(open_pools.items()))
            os.environ["PAGED_KV_PUBLISH"] = str(INTERVAL_S)
            publisher.start()
            decode()
            os.environ["PAGED_KV_PUBLISH"] = "0"
            publisher.stop()

        sides = decode, decode_looked_at, decode
        alone, looked_at, again = in_turns(*sides, repetitions=REPETITIONS)
        publisher = Publisher(lambda: view_process(open_pools.items()))
        looks = [look(publisher) for _ in range(200)]
        publisher.stop()
        figures = {
            "blas": BLAS,
            "backend": factory.stats().backend,
            "batch": BATCH,
            "context": CONTEXT,
            "step_s": median(alone) / STEPS,
            "with_over_without": ratio(looked_at, alone),
            "without_over_without": ratio(again, alone),
            "look_cpu_s": median(looks),
            "busy_share": median(looks) / max(INTERVAL_S, SLEEPS * median(looks)),
            **snapshot_times(),
            **trace_times(Path(folder)),
        }
    for name, figure in figures.items():
        print(f"{name:24} {figure}")
    print(f"written to {write_result('publishing', figures)}")


def look(publisher: Publisher) -> float:
    """Seconds of the processor that one look takes, when everything has changed."""
    publisher._published = None
    began = thread_time()
    publisher.publish()
    return thread_time() - began


def snapshot_times() -> dict[str, float]:
    allocator = used_allocator()
    return {
        "snapshot_blocks": BLOCKS,
        "snapshot_s": median(repeat(allocator.stats, timer=thread_time, number=100, repeat=50))
        / 100,
    }


def used_allocator() -> BlockAllocator:
    allocator = BlockAllocator(ByteBudget(2 * BLOCKS), 1)
    for _ in range(BLOCKS // 100):
        reserve(allocator.new_table(), 0, 100 * allocator.page_size)
    return allocator


def trace_times(folder: Path) -> dict[str, float]:
    """Seconds of the processor that reserving one token for one sequence takes, with and without a
    trace, in turns."""
    budget = ByteBudget(1 << 30)
    events = TracedPool(TraceFile(folder / "trace"), budget, "bench")
    tables = [BlockAllocator(budget, 1, events=each).new_table() for each in (NO_EVENTS, events)]
    times: list[list[float]] = [[], []]
    for _ in range(RESERVATIONS):
        for table, taken in zip(tables, times, strict=True):
            began = thread_time()
            for at in range(table.tokens, table.tokens + 100):
                reserve(table, at, at + 1)
            taken.append((thread_time() - began) / 100)
    without, with_trace = map(median, times)
    return {"reserve_s": without, "reserve_traced_s": with_trace}


if __name__ == "__main__":
    main()
