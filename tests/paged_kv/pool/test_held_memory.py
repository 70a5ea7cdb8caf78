"""What MLX holds, by its own count, beside what tokens need."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from benches.held_bytes import CODES, Rows, ended, prefill
from paged_kv import Sequence
from paged_kv.allocator.format_slabs import IDLE_STEPS
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from tests.support.full_pages import full_format
from tests.support.grids import plain_only


@pytest.fixture(autouse=True)
def exact_memory() -> Iterator[None]:
    """MLX keeps no freed memory, so that its count of active bytes is that of its arrays."""
    limit = mx.set_cache_limit(0)
    yield
    gc.collect()
    mx.set_cache_limit(limit)


@pytest.mark.parametrize(("page_format", "bits"), [("fp16", 20.0), ("q8", 11.5), ("q4", 7.5)])
@pytest.mark.parametrize("max_bytes", plain_only(["256MB"], [None]))
def test_one_sequence_holds_little_more_than_it_needs(
    page_format: str, bits: float, max_bytes: str | None
) -> None:
    rows = Rows(page_format, max_bytes, [1024])
    over = []
    for _ in rows.grow(1 << 13):
        over.append(rows.held / rows.needed)
        # Slabs are aligned to cache lines.
        assert 0 <= rows.held - rows.pool.budget.mapped < 2**14
        assert rows.bits <= bits or rows.lengths[0] <= 1 << 12
    assert max(over) <= 1.25
    assert sum(over) / len(over) <= 1.12


@pytest.mark.parametrize("page_format", ["fp16", "q8", "q4"])
def test_ragged_rows_hold_little_more_than_they_need(page_format: str) -> None:
    rows = Rows(page_format, None, [1100, 1300, 1400, 1536, 1800, 1920, 2000, 2048])
    assert max(rows.held / rows.needed for _ in rows.grow(3000)) <= 1.15


@pytest.mark.slow
@pytest.mark.parametrize("page_format", ["fp16", "q8", "q4"])
def test_memory_of_sequences_that_have_ended_comes_back_in_few_steps(page_format: str) -> None:
    found = ended(page_format, None)
    assert found["at_once"] > 2
    assert found["after_100_steps"] <= 1.25


@pytest.mark.parametrize("page_format", ["fp16", "q8", "q4"])
def test_a_short_sequence_holds_what_it_needs_and_nothing_when_it_has_ended(
    page_format: str,
) -> None:
    rows = Rows(page_format, "256MB", [])
    rows.sequences = [Sequence(rows.pool)]
    # The second step fills a page, for which it takes another one until it ends.
    for count in (200, 190):
        rows.write(count)
    with_spare = rows.held
    for _ in range(IDLE_STEPS + 1):
        rows.write(1)
    full, last = CODES[full_format(page_format, 0)], 16.0
    needed = (full + last) * PAGE_SIZE * rows.numbers / 8
    assert 0 <= rows.held - needed < 2**12
    assert (with_spare > 1.5 * needed) == (page_format != "fp16")
    rows.sequences.clear()
    gc.collect()
    rows.pool.stats()
    assert rows.pool.budget.mapped == 0
    assert rows.held < 2**12


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
    for _ in range(8):
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system is not Linux")
def test_the_system_gets_back_what_a_sequence_held() -> None:
    """Also what arrays read that nobody has computed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before, full, after = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    pages = 4 * 2 * 8 * 8 * 2048 * 64 * 2
    assert full[0] - before[0] > pages
    assert after[0] - before[0] < pages // 4
    assert after[1] - before[1] < 1 << 10


@pytest.mark.parametrize("page_format", ["fp16", "q8", "q4"])
def test_no_prompt_peaks_above_its_pages_in_16_bits(page_format: str) -> None:
    found = prefill(page_format)
    assert found["peak_over_16_bits"] <= 1.1
    assert found["held_over_16_bits"] <= CODES[page_format] / 16 + 0.04
