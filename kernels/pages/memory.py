"""Finds how much memory this machine has for pages, and bounds what MLX keeps beside them."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

# Without a given budget, the rest is left to the system and to a step's activations.
RECOMMENDED_SHARE = 0.8

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def recommended_bytes() -> int:
    """80 % of the device's memory, less what MLX holds now; at least 1.

    On a GPU that is Metal's recommended working set or the CUDA device's memory. On a CPU it is
    the smaller of the control group's limit and the machine's memory.
    """
    usable = int(RECOMMENDED_SHARE * device_bytes()) - mx.get_active_memory()
    return max(usable, 1)


def require_memory(needed: int) -> None:
    """Check that an array of `needed` bytes fits beside what MLX holds now.

    Raises:
        MemoryError: it does not fit.
    """
    total, held = device_bytes(), mx.get_active_memory()
    if needed > total - held:
        raise MemoryError(
            f"a slab of {needed:,} bytes does not fit: this machine has {total:,}, of which MLX "
            f"holds {held:,}. Give the pool a smaller max_bytes"
        )


@contextmanager
def limited_freed_buffers(nbytes: int) -> Iterator[None]:
    """Let MLX keep at most `nbytes` of freed buffers, and no more than its former limit, which it
    gets back at the end. On a CPU, MLX limits itself to 32 MiB."""
    former = mx.set_cache_limit(nbytes)
    mx.set_cache_limit(min(former, nbytes))
    try:
        yield
    finally:
        mx.set_cache_limit(former)


def return_to_system() -> None:
    """Give memory that MLX has freed to the system: MLX keeps freed arrays for later ones, and the
    C library of Linux keeps what MLX frees."""
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def device_bytes() -> int:
    """Metal's recommended working set, or the CUDA device's memory; on a CPU the smaller of the
    control group's limit and the machine's memory."""
    if mx.default_device().type == mx.gpu:
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if key in info:
                return int(info[key])
    return _host_bytes()


def _host_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in map(_read, _CGROUP_LIMITS) if text.isdigit()]
    return min([machine, *limits])


def _read(path: Path) -> str:
    """A file's text; empty if it is missing, as on machines without control groups."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
