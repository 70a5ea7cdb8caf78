"""Serves reads whose kernels are left out with plain operations.

Only reads can be left out one by one. Plain operations replace the slab that they write, while the
kernels of other backends keep its address.
"""

from collections.abc import Collection

import mlx.core as mx

from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.choice import chooses
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.plain.plain_backend import PlainBackend

DECODE, WINDOW_DECODE, STEP_DECODE = "decode", "decode in a window", "write and decode"
PREFILL, GATHER, LATENT_DECODE = "prefill", "gather", "latent decode"
CHOSEN_DECODE = "decode chosen tokens"
READS = (DECODE, WINDOW_DECODE, STEP_DECODE, CHOSEN_DECODE, PREFILL, GATHER, LATENT_DECODE)


def kernel_name(operation: str, number_format: str, dtype: mx.Dtype) -> str:
    """The name of a kernel, such as "decode q4 bfloat16"."""
    return f"{operation} {number_format} {str(dtype).rpartition('.')[2]}"


def operation_of(kernel: str) -> str:
    """The operation in the name of a kernel, such as "decode in a window"."""
    return kernel.rsplit(" ", 2)[0]


def is_read(kernel: str) -> bool:
    """Whether this is the name of a kernel that reads pages, which can be left out alone."""
    return operation_of(kernel) in READS


class PartialBackend:
    """A backend without some of its reading kernels. See `Backend` for the operations.

    Args:
        backend: serves everything else.
        left_out: names of kernels, as `kernel_name` makes them.

    Attributes:
        fallbacks: how often plain MLX operations stood in for a kernel.
    """

    def __init__(self, backend: Backend, left_out: Collection[str]) -> None:
        self._backend = backend
        self._left_out = frozenset(left_out)
        self._plain = PlainBackend()
        self._own_fallbacks = 0
        self.name = backend.name
        self.writes_in_place, self.slab_padding = backend.writes_in_place, backend.slab_padding
        self.supports, self.new_slab = backend.supports, backend.new_slab
        self.begin, self.synchronize = backend.begin, backend.synchronize
        self.forget_pending = backend.forget_pending
        self.write, self.load = backend.write, backend.load
        self.copy, self.gather_tokens = backend.copy, backend.gather_tokens

    @property
    def kept_bytes(self) -> int:
        return self._backend.kept_bytes

    @property
    def fallbacks(self) -> int:
        return self._backend.fallbacks + self._own_fallbacks

    def gather(
        self, pages: LayerMemory, metadata: AttentionMetadata, unwritten: Unwritten | None
    ) -> tuple[mx.array, mx.array]:
        backend = self._serving(pages, GATHER)
        keys, values = backend.gather(pages, metadata, unwritten)
        self._compute_plain(backend, keys, values)
        return keys, values

    def attend(
        self,
        pages: LayerMemory,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        unwritten: Unwritten | None = None,
    ) -> mx.array:
        is_decode = queries.shape[2] == 1 and unwritten is None
        operation = (WINDOW_DECODE if attention.window else DECODE) if is_decode else PREFILL
        if is_decode and chooses(attention, metadata, 1):
            operation = CHOSEN_DECODE
        backend = self._serving(pages, operation)
        output = backend.attend(pages, queries, metadata, attention, unwritten)
        self._compute_plain(backend, output)
        return output

    def write_and_attend(
        self,
        pages: LayerMemory,
        step: Unwritten,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
    ) -> mx.array:
        operations = [STEP_DECODE, *([WINDOW_DECODE] if attention.window else [])]
        if chooses(attention, metadata, queries.shape[2]):
            operations.append(CHOSEN_DECODE)
        if queries.shape[2] > 1:
            operations = [PREFILL]
        if not any(self._leaves_out(pages, each) for each in operations):
            return self._backend.write_and_attend(pages, step, queries, metadata, attention)
        self.write(pages, *step, metadata)
        return self.attend(pages, queries, metadata, attention)

    def attend_latent(
        self,
        pages: LayerMemory,
        queries: mx.array,
        position_queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        unwritten: Unwritten | None = None,
    ) -> mx.array:
        backend = self._serving(pages, LATENT_DECODE)
        output = backend.attend_latent(
            pages, queries, position_queries, metadata, attention, unwritten
        )
        self._compute_plain(backend, output)
        return output

    def _leaves_out(self, pages: LayerMemory, operation: str) -> bool:
        """Whether the kernel for any format of these pages is left out."""
        formats = pages.memo.get(FORMATS) or _formats_in(pages)
        dtype = pages.geometry.k_dtype
        return any(kernel_name(operation, each, dtype) in self._left_out for each in formats)

    def _serving(self, pages: LayerMemory, operation: str) -> Backend:
        """What serves an operation. Plain operations wait for kernels that write the pages, and are
        counted."""
        if not self._leaves_out(pages, operation):
            return self._backend
        self._own_fallbacks += 1
        self._backend.synchronize(pages)
        return self._plain

    def _compute_plain(self, backend: Backend, *results: mx.array) -> None:
        """Compute what plain operations read, before a kernel writes the pages."""
        if backend is self._plain:
            mx.eval(*results)


# The key of the names of formats in the `memo` of layers.
FORMATS = "formats in use"


def _formats_in(pages: LayerMemory) -> frozenset[str]:
    """The names of number formats in a layer's slabs."""
    found = {slab.layout.page_format for slab in pages.slabs.values()}
    pages.memo[FORMATS] = frozenset(
        part.name for each in found for part in (each.keys, each.values)
    )
    names: frozenset[str] = pages.memo[FORMATS]
    return names
