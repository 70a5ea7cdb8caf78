"""Compiles and launches the GPU kernels through MLX, and orders those that touch pages.

A kernel that reads pages takes its own arguments, then always 16 slabs (the first one repeated if
there are fewer), then the arrays that locate pages and sequences. So growing never compiles a
kernel again, and no kernel binds more than the 31 buffers that Metal has.

MLX orders kernels by their input and output arrays. A kernel that writes a slab in place has no
output that readers of the slab take as input. So every kernel that touches pages also outputs a
small token, and takes the token of the kernel before it. Each layer has one chain: a read waits
for earlier writes, and a write for earlier reads. No page is written again while an earlier kernel
may still read it.

When a second thread uses a layer, the first thread's kernels must have been computed, as they are
when a step has ended: see `ThreadConflict`. From then on, every kernel of the layer is sent to the
GPU at once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import mlx.core as mx

from paged_kv.kernels.gpu.text import WITHOUT_PAGES, kernel_text, own_words, shortened
from paged_kv.kernels.pages.layer_memory import MAX_SLABS, LayerMemory, require_computed

OF_PAGES = (*(f"slab{i}" for i in range(MAX_SLABS)), "layouts", "tables", "params", "before")

# The inputs and outputs of each operation, followed by the flag of the variants that have them if
# not all do. An operation on pages has the output `done` too.
NEW_TOKENS = ["new_keys HAS_NEW_TOKENS", "new_values HAS_NEW_TOKENS"]
PREFIX = ["prefix_partials AFTER_PREFIX", "prefix_measures AFTER_PREFIX", "tables AFTER_PREFIX"]
WHOLE_OR_PARTS = ["output WHOLE", "partials PARTIAL", "measures PARTIAL"]
INPUTS = {
    "write": ["keys", "values"],
    "decode": ["queries", "keys STEP", "values STEP", "runs CHOSEN", "sinks SINKS"],
    "latent": ["queries", "position_queries", "groups IN_GROUPS"],
    "merge": ["partials", "measures", *PREFIX, "sinks SINKS", "params"],
    "prefill": ["queries", *NEW_TOKENS, "sinks SINKS", "groups IN_GROUPS"],
    "copy": [],
    "summarise": [],
    "score": ["queries"],
    "gather": NEW_TOKENS,
}
OUTPUTS = {
    "write": [],
    "decode": WHOLE_OR_PARTS,
    "latent": ["partials", "measures"],
    "merge": ["output"],
    "prefill": WHOLE_OR_PARTS,
    "copy": [],
    "summarise": [],
    "score": ["scores"],
    "gather": ["keys", "values"],
}

Maker = Callable[..., Any]
"""`mx.fast.metal_kernel` or `mx.fast.cuda_kernel`, or what tests put in their place."""


@dataclass(frozen=True)
class Output:
    """The shape and dtype of a kernel's output."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


# On Metal, MLX passes inputs of fewer than 8 elements differently, which needs another kernel.
LEAST_ELEMENTS = 8
DONE = Output((LEAST_ELEMENTS,), mx.int32)


Launch = Callable[..., list[mx.array]]
"""Launches a kernel for the argument `inputs`, and returns its outputs. Lazy."""


class GpuKernels:
    """The kernels in one dialect.

    Args:
        dialect: "metal" or "cuda".
        maker: compiles a kernel.

    Attributes:
        made: the kernels by their names.
    """

    def __init__(self, dialect: str, maker: Maker) -> None:
        self.dialect = dialect
        self.maker = maker
        self.made: dict[str, Any] = {}

    def launch(
        self,
        operation: str,
        dtype: mx.Dtype,
        constants: Mapping[str, int],
        flags: Collection[str],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[Output],
    ) -> Launch:
        """A variant of an operation with its grid, in threadgroups, and its outputs: everything but
        a layer's arrays."""
        return partial(
            self.kernel(operation, dtype, constants, flags),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[output.shape for output in outputs],
            output_dtypes=[output.dtype for output in outputs],
        )

    def kernel(
        self, operation: str, dtype: mx.Dtype, constants: Mapping[str, int], flags: Collection[str]
    ) -> Any:
        """A variant of an operation; see `kernels.gpu.text.kernel_text`."""
        number = str(dtype).rpartition(".")[2]
        parts = [operation, *sorted(flags), number, *map(str, constants.values())]
        name = "_".join(["paged_kv", *parts]).lower()
        if name in self.made:
            return self.made[name]
        inputs, outputs = _present(INPUTS[operation], flags), _present(OUTPUTS[operation], flags)
        if operation not in WITHOUT_PAGES:
            inputs, outputs = [*inputs, *OF_PAGES], [*outputs, "done"]
        text = kernel_text(self.dialect, operation, number, constants, flags)
        ours = own_words(self.dialect)
        header, body = shortened(text.header, text.body, ours, {*inputs, *outputs})
        self.made[name] = self.maker(
            name=name,
            input_names=inputs,
            output_names=outputs,
            source=body,
            header=header,
            # True might make MLX copy a slab, and the kernel write the copy.
            ensure_row_contiguous=False,
        )
        return self.made[name]


def _present(arrays: list[str], flags: Collection[str]) -> list[str]:
    """The names of the arrays that a variant with these flags has."""
    parts = [each.partition(" ") for each in arrays]
    return [name for name, _, flag in parts if not flag or flag in flags]


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
