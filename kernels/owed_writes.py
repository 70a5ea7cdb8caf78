"""The latest step of each layer, which its pages are still owed.

A native write must wait until keys and values are computed. Where a step is one token a row, as in
decoding, that takes longer than the write. So such a step is written when anything else is asked of
the layer's pages, mostly by attention, which waits for its queries in any case. Arrays that stand
for these rows, and are made before, get the step as a tail.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from paged_kv.kernels.page_rows import PageRows, Tail

if TYPE_CHECKING:
    from paged_kv.kernels.layer_pages import LayerPages


@dataclass(frozen=True, eq=False)
class _OwedWrite:
    step: Tail
    rows: PageRows


class OwedWrites:
    """At most one write a layer. All methods may be called from any thread.

    Args:
        write: what writes a step now.
    """

    def __init__(self, write: Callable[["LayerPages", Tail, PageRows], None]) -> None:
        self._write = write
        self._owed: WeakKeyDictionary[LayerPages, _OwedWrite] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def owe(self, pages: "LayerPages", step: Tail, rows: PageRows) -> None:
        """Write a step of one token a row later; what was owed is written first.

        It must have begun to be computed: what one thread leaves to be computed later no other
        thread can compute.
        """
        self.pay(pages)
        self._owed[pages] = _OwedWrite(step, rows)

    def pay(self, pages: "LayerPages") -> None:
        """Write what the layer's pages are owed."""
        if pages not in self._owed:
            return
        with self._lock:
            owed = self._owed.get(pages)
            if owed is not None:
                self._write(pages, owed.step, owed.rows)
                del self._owed[pages]

    def step_of(self, pages: "LayerPages", rows: PageRows) -> Tail | None:
        """The step that ends these very rows, if no page holds it yet."""
        owed = self._owed.get(pages)
        return owed.step if owed is not None and owed.rows is rows else None
