"""Shows the pools of this process to other processes of the same user.

A thread looks five times a second whether somebody has asked: see `processes`. After each question
it writes a view of the open pools to PID.json in the runtime folder, and nothing while nobody asks.
There is no port. Only for a view do pools stand still, for some microseconds while references are
copied.

PAGED_KV_PUBLISH=0 shows nothing, and starts no thread.
"""

from __future__ import annotations

import atexit
import heapq
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import add
from pathlib import Path

from paged_kv.monitor.processes import (
    PoolView,
    ProcessView,
    SequenceView,
    is_later,
    last_question,
    make_runtime_folder,
    remove_ended,
    runtime_folder,
)
from paged_kv.pool.page_pool import PagePool, open_pools

logger = logging.getLogger("paged_kv")

# `paged-kv stats` waits about half as long for an answer.
LOOK_S = 0.2
LARGEST_SEQUENCES = 10
LONGEST_COMMAND = 200


def view_process(pools: Iterable[PagePool]) -> ProcessView:
    """A view of the pools of this process, without those that stay locked."""
    pools = sorted(pools, key=lambda pool: pool.serial)
    views = [view_pool(pool) for pool in pools]
    there = tuple([view for view in views if view is not None])
    command = " ".join(" ".join(sys.orig_argv).split())[:LONGEST_COMMAND]
    ranks = {rank: memory for pool in pools for rank, memory in pool.ranks.memory.items()}
    return ProcessView(os.getpid(), command, time.time(), there, tuple(sorted(ranks.items())))


def view_pool(pool: PagePool) -> PoolView | None:
    """A view of a pool; None if it stays locked for a second."""
    if not pool.lock.acquire(timeout=1.0):
        return None
    try:
        stats = pool.snapshot()
        allocators = [group.allocator for group in pool.groups if group.is_open]
        maps = [allocator.block_map() for allocator in allocators]
        sequences = _largest_sequences(pool)
    finally:
        pool.lock.release()
    slabs = tuple([(group, slab) for group, states in enumerate(maps) for slab in states()])
    return PoolView(pool.name, pool.serial, stats, slabs, sequences)


def _largest_sequences(pool: PagePool) -> tuple[SequenceView, ...]:
    views: dict[str, SequenceView] = {}
    for group in pool.groups:
        tables = list(group.allocator.tables) if group.is_open else []
        tables = [table for table in tables if not table.is_scratch]
        for table in heapq.nlargest(LARGEST_SEQUENCES, tables, key=lambda each: len(each.blocks)):
            allocator = table.allocator
            shared = sum(allocator.refs.holders(block) > 1 for block in table.blocks)
            nbytes = sum(allocator.format_of(block).block_bytes for block in table.blocks)
            name, tokens, *sums = views.get(table.owner, (table.owner[:8], 0, 0, 0, 0))
            counts = map(add, sums, (len(table.blocks), shared, nbytes))
            views[table.owner] = SequenceView(name, max(tokens, table.tokens), *counts)
    largest = heapq.nlargest(LARGEST_SEQUENCES, views.values(), key=lambda each: each.nbytes)
    return tuple(largest)


class Publisher:
    """Writes what `view` returns whenever somebody asks, from a thread that `start` starts.

    A process that is forked from this one shows nothing until `start` is called there.
    """

    def __init__(self, view: Callable[[], ProcessView]) -> None:
        self._view = view
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._is_over = False
        atexit.register(self.stop)

    def start(self) -> None:
        """Answer from now on, until the process ends.

        Raises:
            ValueError: PAGED_KV_PUBLISH is no number from 0 on.
        """
        if is_wanted() and not self._runs:
            self._thread = threading.Thread(target=self._run, name="paged-kv", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Answer no longer, and remove the file."""
        self._is_over = True
        if self._runs and self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def _runs(self) -> bool:
        # A forked process has this object, and not its thread.
        return self._thread is not None and self._thread.is_alive()

    def publish(self, path: Path) -> None:
        """Write the present view to a file; raises an OSError if it cannot be written."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self._view().as_dict()))
        part.replace(path)

    def _run(self) -> None:
        try:
            folder = runtime_folder()
            make_runtime_folder(folder)
            remove_ended(folder)
            self._path = folder / f"{os.getpid()}.json"
            self._path.unlink(missing_ok=True)  # of an earlier process with this number
        except OSError as error:
            logger.info("cannot show the pools of this process: %s", error)
            return
        while not self._is_over:
            with suppress(OSError):  # the disk may be full, or the folder gone, for a while
                # Empty from the start, so that whoever asks knows whom to wait for.
                if not self._path.exists():
                    make_runtime_folder(folder)
                    self._path.touch()
                if not is_later(self._path.stat(), last_question(folder)):
                    self.publish(self._path)
            time.sleep(LOOK_S)
        self._path.unlink(missing_ok=True)


def is_wanted() -> bool:
    """Whether PAGED_KV_PUBLISH lets others see this process: any number but 0 does, as it once was
    a number of seconds.

    Raises:
        ValueError: it is no number from 0 on.
    """
    text = os.environ.get("PAGED_KV_PUBLISH") or "1"
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(
            "PAGED_KV_PUBLISH must be 0, so that `paged-kv stats` does not see this process, or 1, "
            f"got {text!r}"
        )
    return number > 0


publisher = Publisher(lambda: view_process(open_pools.items()))
