"""What was read from a layer's pages and may not be computed yet.

A gathered array reads the pages when it is computed, and a page that is written in place by then
shows the new contents. So what may still be needed is computed before a page changes: arrays that
somebody holds, and arrays that somebody has put into a graph and let go of.

What one thread leaves to be computed no other thread can compute, so each computes its own.
"""

import threading
import weakref
from collections.abc import Iterable

import mlx.core as mx


class LazyReads:
    """Arrays by the thread that made them. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._held: list[tuple[int, weakref.ref[mx.array]]] = []
        self._left: list[tuple[int, tuple[mx.array, ...]]] = []

    def watch(self, array: mx.array) -> None:
        """Note an array that its caller holds."""
        self._held.append((threading.get_ident(), weakref.ref(array)))

    def leave(self, arrays: Iterable[mx.array], thread: int) -> None:
        """Note arrays that a thread has made and nobody holds any more but, maybe, a graph.

        The collector may call this at any time: it only appends.
        """
        self._left.append((thread, tuple(arrays)))

    def waiting(self) -> list[mx.array]:
        """This thread's arrays that may not be computed yet."""
        me = threading.get_ident()
        held = [reference() for thread, reference in self._held if thread == me]
        left = [array for thread, arrays in self._left if thread == me for array in arrays]
        return left + [array for array in held if array is not None]

    def compute(self) -> None:
        """Compute this thread's arrays, and forget them."""
        if not self._held and not self._left:
            return
        mx.eval(self.waiting())
        me = threading.get_ident()
        self._held = [entry for entry in self._held if entry[0] != me and entry[1]() is not None]
        self._left = _of_living([entry for entry in self._left if entry[0] != me])


def _of_living(
    others: list[tuple[int, tuple[mx.array, ...]]],
) -> list[tuple[int, tuple[mx.array, ...]]]:
    """Without what belongs to threads that have ended: nothing will be computed there."""
    if not others:
        return []
    living = {thread.ident for thread in threading.enumerate()}
    return [entry for entry in others if entry[0] in living]
