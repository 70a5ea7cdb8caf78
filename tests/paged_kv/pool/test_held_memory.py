"""The system gets back the memory of sequences that have ended."""

import subprocess
import sys
from pathlib import Path

import pytest

# Prints the process's resident bytes before, with, and after the pages of a sequence.
SCRIPT = """
import gc, pathlib
import mlx.core as mx
from paged_kv import PagedKVCache, PagePool, Sequence

def resident():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

pool = PagePool(4, max_bytes="1GB")
def write():
    sequence = Sequence(pool)
    caches = [PagedKVCache(pool, layer, [sequence]) for layer in range(4)]
    step = mx.ones((1, 8, 2048, 64), dtype=mx.float16)
    for _ in range(4):
        for cache in caches:
            keys, values = cache.update_and_fetch(step, step)
            mx.eval(keys[:, :, -1], values[:, :, -1])
    print(resident(), mx.get_active_memory())

print(resident(), mx.get_active_memory())
write()
gc.collect()
pool.clear()
print(resident(), mx.get_active_memory())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system is not Linux")
def test_the_system_gets_back_what_a_sequence_held() -> None:
    """Also what arrays read that nobody has computed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before, full, after = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    pages = 4 * 2 * 8 * 4 * 2048 * 64 * 2
    assert full[0] - before[0] > pages
    assert after[0] - before[0] < pages // 4
    assert after[1] - before[1] < 1 << 10
