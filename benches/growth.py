"""The memory cost of growing to 16K tokens, beside mlx-lm's own cache: python -m benches.growth

Both caches take the same tokens, float16 of 8 layers with 8 heads of 128, and nothing attends.
Every step appends to one layer after the other, and evaluates the layer's arrays before the next
layer, as consecutive layers do; all layers in one evaluation would make KVCache hold eight old
arrays beside eight new ones. Decode appends one token at a time, prefill 2,048. All bytes are MLX's
own count of active memory.

    held                bytes of the cache at the end
    peak above held     the highest peak of any step, less the bytes held at the end
    largest spike       the most that one step's peak lies above the bytes held before the step
    largest transient   the same, above the larger of before and after: bytes that the step freed
    copied for growth   KVCache: not counted but derived, from the sizes of its arrays: each time
                        they change, the tokens before are concatenated into the new ones.
                        Pages: the slabs that are gone, whose pages moved to others, and pages
                        that the pool reports as copied on write.
"""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from benches.results_file import write_result
from paged_kv import PagedKVCache, PagePool, Sequence

LAYERS, HEADS, DIM, TOKENS = 8, 8, 128, 16_384
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * mx.float16.size
STEPS = {"decode": 1, "prefill": 2_048}


class Subject(Protocol):
    """A cache of all layers."""

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append to every layer, and wait for it."""
        ...

    def copied(self) -> int:
        """Bytes that were copied for growth since the last call."""
        ...


class Contiguous:
    """mlx-lm's KVCache."""

    def __init__(self) -> None:
        self._caches = [KVCache() for _ in range(LAYERS)]
        self._room = 0
        self._tokens = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        for cache in self._caches:
            cache.update_and_fetch(keys, values)
            mx.eval(cache.keys, cache.values)

    def copied(self) -> int:
        before, self._tokens = self._tokens, self._caches[0].offset
        keys = self._caches[0].keys
        room, self._room = self._room, 0 if keys is None else keys.shape[2]
        return before * TOKEN_BYTES if room != self._room else 0


class Paged:
    """Pages of a pool."""

    def __init__(self, max_bytes: int) -> None:
        self._pool = PagePool(LAYERS, max_bytes=max_bytes)
        sequence = Sequence(self._pool)
        self._caches = [PagedKVCache(self._pool, layer, [sequence]) for layer in range(LAYERS)]
        self._sizes: dict[int, int] = {}
        self._cow_copies = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        layers = self._pool.groups[0].pages
        for layer, cache in enumerate(self._caches):
            written, _ = cache.batch.append(layer, keys, values)
            # Else the next write would first gather what this one returned.
            written.read.leave_unread()
            mx.eval([slab.memory for slab in layers[layer].slabs.values()])

    def copied(self) -> int:
        before, self._sizes = self._sizes, self._slab_sizes()
        stats = self._pool.stats()
        copies, self._cow_copies = stats.cow_copies - self._cow_copies, stats.cow_copies
        block_bytes = stats.bytes_active // stats.blocks_used
        return sum(before[at] for at in before.keys() - self._sizes.keys()) + copies * block_bytes

    def _slab_sizes(self) -> dict[int, int]:
        """Bytes of each slab of each layer, by its address."""
        return {
            np.asarray(slab.memory).ctypes.data: slab.memory.nbytes
            for pages in self._pool.groups[0].pages.values()
            for slab in pages.slabs.values()
        }


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "KVCache": Contiguous,
    "pages": lambda: Paged(1 << 30),
}


def measure(make: Callable[[], Subject], step: int) -> dict[str, float]:
    """Grow a new cache to all tokens, `step` at a time."""
    gc.collect()
    mx.clear_cache()
    keys = mx.random.normal((1, HEADS, step, DIM)).astype(mx.float16)
    values = keys + 1
    mx.eval(keys, values)
    start = mx.get_active_memory()
    subject = make()
    seconds, peaks, held, copied = [], [], [start], 0
    for _ in range(TOKENS // step):
        mx.reset_peak_memory()
        began = time.perf_counter()
        subject.append(keys, values)
        seconds.append(time.perf_counter() - began)
        held.append(mx.get_active_memory())
        peaks.append(max(mx.get_peak_memory(), held[-1]))
        copied += subject.copied()
    steps = list(zip(peaks, held, held[1:], strict=False))
    return {
        "held_bytes": held[-1] - start,
        "peak_above_held_bytes": max(peaks) - held[-1],
        "largest_spike_bytes": max(peak - before for peak, before, _ in steps),
        "largest_transient_bytes": max(peak - max(around) for peak, *around in steps),
        "copied_for_growth_bytes": copied,
        "median_step_seconds": median(seconds),
        "max_step_seconds": max(seconds),
    }


def grown(step: int) -> dict[str, dict[str, float]]:
    """The figures of both caches, and step times over the median of KVCache."""
    found = {name: measure(make, step) for name, make in SUBJECTS.items()}
    unit = found["KVCache"]["median_step_seconds"]
    for each in found.values():
        for name in ("median_step", "max_step"):
            each[f"{name}_over_kv_cache_median"] = each[f"{name}_seconds"] / unit
    return found


def main() -> None:
    geometry = {"layers": LAYERS, "heads": HEADS, "dim": DIM, "dtype": "float16"}
    tokens = {"tokens": TOKENS, "token_bytes": TOKEN_BYTES, "tokens_per_step": STEPS}
    measured = {phase: grown(step) for phase, step in STEPS.items()}
    write_result("growth", {**geometry, **tokens, **measured})


if __name__ == "__main__":
    main()
