"""Runs a process with a pool that other processes can show."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.folders import ROOT

# Two sequences of 300 tokens share two blocks, and a third has one block of its own.
SCRIPT = """
import copy, sys
import mlx.core as mx
from paged_kv import PagedKVCache, PagePool, Sequence

pool = PagePool(2, max_bytes=1 << 22, name="shown")
def caches():
    sequence = Sequence(pool)
    return [PagedKVCache(pool, layer, [sequence]) for layer in range(2)]
def write(layers, count):
    for cache in layers:
        cache.update_and_fetch(*[mx.zeros((1, 1, count, 4))] * 2)
first, third = caches(), caches()
write(first, 300)
second = copy.deepcopy(first)
write(third, 20)
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def shown_process(folder: Path, script: str = SCRIPT, **environment: str) -> Iterator[int]:
    """The process number of a waiting process, whose runtime folder is in `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder), **environment},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.communicate("\n")
