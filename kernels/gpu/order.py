"""Orders a GPU's reads and writes of the pages of a layer.

MLX orders kernels by their input and output arrays. A kernel that writes a slab in place has no
output that readers of the slab take as input. So every kernel that touches pages also outputs a
small token, and takes the token of the kernel before it. Each layer has one chain: a read waits
for earlier writes, and a write for earlier reads. No page is written again while an earlier kernel
may still read it.

When a second thread uses a layer, the first thread's kernels must have been computed, as they are
when a step has ended: see `ThreadConflict`. From then on, every kernel of the layer is sent to the
GPU at once.
"""

from dataclasses import dataclass
from threading import get_ident

import mlx.core as mx

from paged_kv.kernels.gpu.kernels import DONE, Launch
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.lazy_reads import require_computed


@dataclass
class Chain:
    """The order of one layer's kernels.

    Attributes:
        latest: the token of the latest kernel.
        thread: the thread that ran it.
        is_shared: whether kernels are sent to the GPU at once.
    """

    latest: mx.array
    thread: int
    is_shared: bool = False


class Order:
    """Chains the kernels of each layer. The layer's `kept` holds the latest token."""

    def run(self, pages: LayerMemory, launch: Launch, inputs: list[mx.array]) -> list[mx.array]:
        """Run a kernel that touches pages after all earlier ones; returns its outputs, the token
        last."""
        chain: Chain | None = pages.kept
        if chain is None or chain.thread != get_ident():
            chain = self._chain(pages)
        outputs = launch(inputs=[*inputs, chain.latest])
        chain.latest = outputs[-1]
        if chain.is_shared:
            mx.async_eval(chain.latest)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types
        return outputs

    def follow(self, pages: LayerMemory, token: mx.array) -> None:
        """Let the next kernel wait for a token, which a kernel after all earlier ones has made."""
        chain = self._chain(pages)
        chain.latest = token
        if chain.is_shared:
            mx.async_eval(token)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types

    def restart(self, pages: LayerMemory) -> None:
        """Let the next kernel wait for none."""
        if pages.kept is not None:
            pages.kept.latest = mx.zeros(DONE.shape, DONE.dtype)

    def latest(self, pages: LayerMemory) -> mx.array:
        """The token for the next kernel.

        Raises:
            ThreadConflict: another thread's kernels are not computed yet.
        """
        return self._chain(pages).latest

    def _chain(self, pages: LayerMemory) -> Chain:
        """The chain of a layer, for this thread."""
        chain: Chain | None = pages.kept
        if chain is None:
            chain = pages.kept = Chain(mx.zeros(DONE.shape, DONE.dtype), get_ident())
        elif chain.thread != get_ident():
            require_computed(chain.latest)
            chain.thread, chain.is_shared = get_ident(), True
        return chain
