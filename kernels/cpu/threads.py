"""Chooses how many threads the CPU kernels use."""

import os
from math import ceil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def thread_count() -> int:
    """The number that PAGED_KV_THREADS gives, or else the cores that this process may use.

    Raises:
        ValueError: PAGED_KV_THREADS is not a number from 1 on.
    """
    asked = os.environ.get("PAGED_KV_THREADS")
    if asked is None:
        return available_cores()
    if not asked.isascii() or not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"PAGED_KV_THREADS must be a number of threads from 1 on, got {asked!r}")
    return int(asked)


def available_cores() -> int:
    """The cores that this process's affinity and its control groups' quotas allow; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *_quotas(_own_groups())]))


def _own_groups() -> list[Path]:
    """The folders of this process's control groups and of their parents."""
    names = {"/"}
    for line in _read(OWN_CGROUPS).splitlines():
        names.add(line.rpartition(":")[2])
    folders = []
    for root in (CGROUPS, CGROUPS / "cpu"):
        for name in names:
            path = root / name.lstrip("/")
            folders += [path, *(parent for parent in path.parents if root in parent.parents)]
    return folders


def _quotas(folders: list[Path]) -> list[int]:
    """The cores, rounded up, that quotas of control groups (version 2 or 1) allow."""
    quotas = []
    for folder in folders:
        limit, _, period = _read(folder / "cpu.max").partition(" ")
        if not limit:
            limit = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(period):
            quotas.append(ceil(int(limit) / int(period)))
    return quotas


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
