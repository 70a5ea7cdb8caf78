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

    def compute(self) -> None:
        """Compute this thread's arrays, and forget them."""
        if not self._held and not self._left:
            return
        me = threading.get_ident()
        held, self._held = self._held, []
        left, self._left = self._left, []
        mine = [array for thread, arrays in left if thread == me for array in arrays]
        for thread, reference in held:
            array = reference()
            if array is not None and thread == me:
                mine.append(array)
            elif array is not None:
                self._held.append((thread, reference))
        self._left += _of_living(entry for entry in left if entry[0] != me)
        mx.eval(mine)


def _of_living(
    left: Iterable[tuple[int, tuple[mx.array, ...]]],
) -> list[tuple[int, tuple[mx.array, ...]]]:
    """Without what belongs to threads that have ended: nothing will be computed there."""
    others = list(left)
    if not others:
        return []
    living = {thread.ident for thread in threading.enumerate()}
    return [entry for entry in others if entry[0] in living]
