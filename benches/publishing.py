"""Monitoring overhead of the watched process, and of a look: python -m benches.publishing

stdlib-llama decodes a batch of 8, in turns with and without another process that asks for its
statistics twice a second, as `paged-kv stats --watch` does, and once more without. Ratios are
medians of those within a turn; the ratio of the two sides without is the noise. The processor time
of one answer is measured too, which other load does not change, and so its share of the processor.
Last, the time of a snapshot with 10,000 used blocks.
"""

from benches.openblas import BLAS

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import thread_time
from timeit import repeat

import mlx.core as mx

from benches.models import filled, load_model
from benches.results_file import write_result
from benches.whole_model import step
from paged_kv import PagedCacheFactory
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.monitor.publisher import publisher
from tests.support.reserving import reserve

INTERVAL_S = 0.5
WATCH = """
import sys, time
from paged_kv.monitor.processes import running_process
while True:
    running_process(int(sys.argv[1]))
    print(flush=True)
    time.sleep(float(sys.argv[2]))
"""
BATCH, CONTEXT, STEPS, REPETITIONS = 8, 1024, 20, 61
BLOCKS, RESERVATIONS = 10_000, 200


def main() -> None:
    mx.random.seed(0)
    model, _ = load_model("stdlib-llama")
    factory = PagedCacheFactory(model, max_bytes=1 << 30)
    decode_one = step(model, filled(model, factory.make_cache(), BATCH, CONTEXT), BATCH)

    def decode() -> None:
        for _ in range(STEPS):
            decode_one()

    with watching() as watcher:

        def decode_watched() -> None:
            watcher.send_signal(signal.SIGCONT)
            decode()
            watcher.send_signal(signal.SIGSTOP)

        sides = decode, decode_watched, decode
        alone, watched, again = in_turns(*sides, repetitions=REPETITIONS)
    with TemporaryDirectory() as folder:
        looks = [look(Path(folder) / "view.json") for _ in range(200)]
    figures = {
        "blas": BLAS,
        "backend": factory.stats().backend,
        "batch": BATCH,
        "context": CONTEXT,
        "step_s": median(alone) / STEPS,
        "with_over_without": ratio(watched, alone),
        "without_over_without": ratio(again, alone),
        "look_cpu_s": median(looks),
        "busy_share": median(looks) / INTERVAL_S,
        **snapshot_times(),
    }
    write_result("publishing", figures)


@contextmanager
def watching() -> Iterator[subprocess.Popen[bytes]]:
    """A process that asks this one for its statistics; stopped at first."""
    command = [sys.executable, "-c", WATCH, str(os.getpid()), str(INTERVAL_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()  # it has asked once
        watcher.send_signal(signal.SIGSTOP)
        yield watcher
        watcher.kill()


def look(path: Path) -> float:
    """Seconds of the processor that one answer takes."""
    began = thread_time()
    publisher.publish(path)
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


if __name__ == "__main__":
    main()
