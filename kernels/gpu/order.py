"""In which order a GPU reads and writes the pages of a layer.

MLX orders kernels by the arrays that they take and give. A kernel that writes a slab in place gives
none that readers of the slab would take; so every kernel that touches pages gives a small token,
and takes the one of the kernel before it. One chain for each layer of a pool: a read waits for
the writes before it, and a write for the reads, so that a page is never written again while an
earlier kernel may still read it.

What one thread leaves to be computed no other thread can compute. So where a second thread comes,
what the first has asked for must have been computed, as it is when a step has ended; and from then
on every kernel of the layer is handed to the GPU at once.
"""

from dataclasses import dataclass
from threading import get_ident

import mlx.core as mx

from paged_kv.kernels.gpu.kernels import DONE, Launch
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.kernels.pages.layer_memory import LayerMemory


@dataclass
class _Chain:
    latest: mx.array
    thread: int
    is_shared: bool = False


class Order:
    """The latest token of each layer, which its pages keep."""

    def run(self, pages: LayerMemory, launch: Launch, inputs: list[mx.array]) -> list[mx.array]:
        """What a kernel that touches pages gives, its token last, after all kernels before it."""
        chain: _Chain | None = pages.kept
        if chain is None or chain.thread != get_ident():
            chain = self._chain(pages)
        outputs = launch([*inputs, chain.latest])
        chain.latest = outputs[-1]
        if chain.is_shared:
            mx.async_eval(chain.latest)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types
        return outputs

    def latest(self, pages: LayerMemory) -> mx.array:
        """What the next kernel takes.

        Raises:
            ThreadConflict: another thread has asked for something that it has not computed yet.
        """
        return self._chain(pages).latest

    def _chain(self, pages: LayerMemory) -> _Chain:
        """The chain of a layer, for this thread."""
        chain: _Chain | None = pages.kept
        if chain is None:
            chain = pages.kept = _Chain(mx.zeros(DONE.shape, DONE.dtype), get_ident())
        elif chain.thread != get_ident():
            try:
                mx.eval(chain.latest)
            except RuntimeError as error:
                raise ThreadConflict from error
            chain.thread, chain.is_shared = get_ident(), True
        return chain
