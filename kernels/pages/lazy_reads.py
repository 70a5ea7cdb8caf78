"""Tracks lazy arrays that were gathered from a layer's pages and may not be computed yet.

A gathered array reads the pages when MLX computes it. If a page was written in place by then, the
array would show the new contents. So `LazyReads` computes these arrays before a page changes, both
those that a caller holds and those that only a graph may hold.

Each thread computes its own arrays. Another thread's array must be computed already if it reads a
page that is about to change: see `ThreadConflict`.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread, current_thread
from typing import NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.errors import ThreadConflict


class _Read(NamedTuple):
    """Arrays that a thread gathered: held by its caller, or possibly by a graph."""

    thread: Thread
    metadata: AttentionMetadata
    held: tuple["weakref.ref[mx.array]", ...] = ()
    in_graph: tuple[mx.array, ...] = ()

    def waiting(self) -> list[mx.array]:
        held = [reference() for reference in self.held]
        return [*self.in_graph, *[array for array in held if array is not None]]


class LazyReads:
    """The gathered arrays of one layer. All methods may be called from any thread.

    Attributes:
        noted: reads that may not be computed yet.
    """

    def __init__(self) -> None:
        self.noted: list[_Read] = []

    def watch(self, arrays: Iterable[mx.array], metadata: AttentionMetadata) -> None:
        """Note arrays gathered for `metadata` that the caller holds."""
        self.noted.append(_Read(current_thread(), metadata, held=tuple(map(weakref.ref, arrays))))

    def leave(
        self, arrays: tuple[mx.array, ...], metadata: AttentionMetadata, thread: Thread
    ) -> None:
        """Note arrays gathered for `metadata` by `thread` that only a graph may still hold.

        The garbage collector may call this at any time, so it only appends.
        """
        self.noted.append(_Read(thread, metadata, in_graph=arrays))

    def waiting(self) -> list[mx.array]:
        """This thread's arrays that may not be computed yet."""
        me = current_thread()
        return [array for read in self.noted if read.thread is me for array in read.waiting()]

    def compute_reads_of(self, is_read: Callable[[int], bool]) -> None:
        """Compute and forget this thread's arrays that read such table entries, before these lose
        their memory: until then the arrays would hold it. Arrays that cannot be computed, because
        they are part of a function that MLX traces, stay noted."""
        me = current_thread()
        for read in list(self.noted):
            tables = read.metadata.block_tables
            if read.thread is me and any(is_read(entry) for table in tables for entry in table):
                with suppress(RuntimeError):
                    mx.eval(read.waiting())
                    self.noted.remove(read)

    def compute(self, changing: Callable[[], set[int]]) -> None:
        """Compute and forget this thread's arrays, before a write to the table entries that
        `changing` returns.

        Raises:
            ThreadConflict: another thread's array reads such an entry and is not computed yet.
        """
        # Reads that the garbage collector appends meanwhile stay noted.
        reads, self.noted = self.noted, []
        if not reads:
            return
        me = current_thread()
        try:
            mx.eval([array for read in reads if read.thread is me for array in read.waiting()])
        except BaseException:
            self.noted[:0] = reads
            raise
        # A thread that has ended will compute nothing.
        others = [read for read in reads if read.thread is not me and read.thread.is_alive()]
        others = [read for read in others if read.waiting()]
        if others:
            self.noted[:0] = others
            entries = changing()
            for read in others:
                if any(not entries.isdisjoint(table) for table in read.metadata.block_tables):
                    require_computed(*read.waiting())


def require_computed(*arrays: mx.array) -> None:
    """Raise ThreadConflict unless arrays of another thread are computed."""
    try:
        mx.eval(*arrays)
    except RuntimeError as error:
        raise ThreadConflict from error
