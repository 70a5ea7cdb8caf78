"""In which order a GPU reads and writes the pages of a layer.

MLX orders kernels by the arrays that they take and give. A kernel that writes a slab in place gives
none that readers of the slab would take; so every kernel that touches pages gives a small token,
and takes the one of the kernel before it. One chain for each layer of a pool: a read waits for
the writes before it, and a write for the reads, so that a page is never written again while an
earlier kernel may still read it.
"""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import mlx.core as mx

from paged_kv.kernels.gpu_kernels import DONE

if TYPE_CHECKING:
    from paged_kv.kernels.layer_pages import LayerPages


class Order:
    """The latest token of each layer."""

    def __init__(self) -> None:
        self._latest: WeakKeyDictionary[LayerPages, mx.array] = WeakKeyDictionary()

    def before(self, pages: "LayerPages") -> mx.array:
        """What the next kernel takes."""
        if pages not in self._latest:
            self._latest[pages] = mx.zeros(DONE.shape, DONE.dtype)
        return self._latest[pages]

    def after(self, pages: "LayerPages", done: mx.array) -> None:
        """What the kernel has given."""
        self._latest[pages] = done
