"""How fast the allocator hands out blocks: python -m benches.allocator

All parts use one allocator of 200,000 blocks of which every second is in use. Times are from
time.perf_counter_ns, with the garbage collector on:

- pairs: allocate one block and release it, as a stream that grows and ends does. The rate is that
  of a loop of pairs; the latencies are of single pairs, each with one reading of the clock in it.
- bulk: allocate half of the free blocks in one call, and release them in one call.
- fork: a second table of the 128 blocks of a table, 32,768 tokens; dropping it is not counted.

Each figure is the median of its repetitions.
"""

from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter_ns

from benches.results_file import write_result
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from tests.support.reserving import reserve

BLOCKS = 100_000
BULK_BLOCKS = BLOCKS // 2
PAIRS = 20_000
FORK_BLOCKS = 128
FORKS = 2_000
REPETITIONS = 25
TARGETS = {
    "pairs_per_second": 150_000,
    "bulk_allocated_blocks_per_second": 1_000_000,
    "bulk_released_blocks_per_second": 1_000_000,
}


def main() -> None:
    allocator = half_used_allocator()
    figures = {
        "blocks_used": allocator.stats().blocks_used,
        "blocks_free": allocator.stats().blocks_free,
        "repetitions": REPETITIONS,
        "pairs_per_second": round(median_of(lambda: pairs_per_second(allocator))),
        **pair_latencies(allocator),
        **bulk_rates(allocator),
        f"fork_of_{FORK_BLOCKS}_blocks_ns": round(median_of(lambda: fork_ns(allocator))),
    }
    for name, figure in figures.items():
        target = f"   (target: at least {TARGETS[name]:,})" if name in TARGETS else ""
        print(f"{name:34} {figure:>12,}{target}")
    print(f"written to {write_result('allocator', {**figures, 'targets': TARGETS})}")


def median_of(measure: Callable[[], float]) -> float:
    return median(measure() for _ in range(REPETITIONS))


def half_used_allocator() -> BlockAllocator:
    """Every second block used, so that no slab is ever empty and given back."""
    allocator = BlockAllocator(ByteBudget(2 * BLOCKS), block_bytes=1)
    blocks = allocator.allocate(2 * BLOCKS)
    allocator.release(blocks[::2])
    return allocator


def pairs_per_second(allocator: BlockAllocator) -> float:
    began = perf_counter_ns()
    for _ in range(PAIRS):
        allocator.release(allocator.allocate(1))
    return PAIRS * 1e9 / (perf_counter_ns() - began)


def pair_latencies(allocator: BlockAllocator) -> dict[str, int]:
    """The percentiles of each repetition, and of those the medians."""
    percentiles = [pair_percentiles(allocator) for _ in range(REPETITIONS)]
    names = ("pair_p50_ns", "pair_p99_ns", "pair_p99.9_ns")
    columns = zip(*percentiles, strict=True)
    return {name: round(median(column)) for name, column in zip(names, columns, strict=True)}


def pair_percentiles(allocator: BlockAllocator) -> tuple[float, float, float]:
    latencies = []
    for _ in range(PAIRS):
        began = perf_counter_ns()
        allocator.release(allocator.allocate(1))
        latencies.append(perf_counter_ns() - began)
    cuts = quantiles(latencies, n=1000)
    return cuts[499], cuts[989], cuts[998]


def bulk_rates(allocator: BlockAllocator) -> dict[str, int]:
    allocated, released = zip(*(bulk_ns(allocator) for _ in range(REPETITIONS)), strict=True)
    return {
        "bulk_allocated_blocks_per_second": round(BULK_BLOCKS * 1e9 / median(allocated)),
        "bulk_released_blocks_per_second": round(BULK_BLOCKS * 1e9 / median(released)),
    }


def bulk_ns(allocator: BlockAllocator) -> tuple[int, int]:
    """Nanoseconds to allocate many blocks, and to release them."""
    began = perf_counter_ns()
    blocks = allocator.allocate(BULK_BLOCKS)
    allocated = perf_counter_ns()
    allocator.release(blocks)
    return allocated - began, perf_counter_ns() - allocated


def fork_ns(allocator: BlockAllocator) -> float:
    """Nanoseconds of one fork, the median of many."""
    table = allocator.new_table()
    reserve(table, 0, FORK_BLOCKS * allocator.page_size)
    times = []
    for _ in range(FORKS):
        began = perf_counter_ns()
        fork = allocator.fork(table)
        times.append(perf_counter_ns() - began)
        allocator.drop(fork)
    allocator.drop(table)
    return median(times)


if __name__ == "__main__":
    main()
