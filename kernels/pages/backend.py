"""Holds the memory of one layer, and defines the interface of backends: the operations on it, and
how they take part in recorded steps.

Only the backend decides how a write reaches a slab, and what later reads must wait for. So no
other code touches page memory.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.errors import QuantisedPage
from paged_kv.kernels.pages.page_format import FP16, LayerGeometry, PageFormat, PageLayout, Plane
from paged_kv.kernels.pages.tables import Tables

# Slabs that a kernel takes, each as an argument of its own. Metal allows 31 arguments in all.
MAX_SLABS = 16
# The key of a batch's `memo` once its pages are known to take a step.
WRITABLE = "writable"


@dataclass(eq=False)
class Slab:
    """Adjacent pages of one format, which never changes.

    Attributes:
        memory: uint16 [pages * page_units, unit_words].
        layout: the layout of each page.
    """

    memory: mx.array
    layout: PageLayout

    def view(self, plane: Plane, first: int) -> mx.array:
        """A view of a plane of all pages, uint16 [pages, heads, slots, slot_words].

        Args:
            first: the first word of the plane within a page.
        """
        layout, slots = self.layout, (plane.heads, plane.slots, plane.slot_words)
        strides = layout.page_words, plane.head_words, plane.slot_words, 1
        pages = self.memory.shape[0] // layout.page_units
        return mx.as_strided(self.memory, (pages, *slots), strides, first)

    @property
    def planes(self) -> list[mx.array]:
        """Views of the planes of keys and values."""
        return list(map(self.view, self.layout.planes, self.layout.offsets))


class LayerMemory:
    """The slabs of one layer. A slab is one allocation, and the pool grows by adding slabs.

    Args:
        geometry: the shape of the layer's keys and values.
        slab_stride: a table entry is slab * slab_stride + page.

    Attributes:
        slabs: the slabs by number.
        memo: data that the backend derives from the slabs; cleared when they change.
        kept: data that the backend keeps as long as the layer.
    """

    def __init__(self, geometry: LayerGeometry, slab_stride: int) -> None:
        self.geometry = geometry
        self.slab_stride = slab_stride
        self.slabs: dict[int, Slab] = {}
        self.memo: dict[Any, Any] = {}
        self.kept: Any = None

    def page_bytes(self, page_format: PageFormat) -> int:
        """Bytes of a page of that format.

        Raises:
            ValueError: the format cannot hold the layer's keys and values.
        """
        return PageLayout(page_format, self.geometry).page_bytes

    def layout_of(self, entry: int) -> PageLayout:
        """The layout of a page."""
        return self.slabs[entry // self.slab_stride].layout

    def require_writable(self, metadata: AttentionMetadata, count: int) -> None:
        """Check, once for all layers of a step of `count` tokens, that its pages have 16 bits.

        Raises:
            QuantisedPage: one of them is quantised.
        """
        if WRITABLE not in metadata.memo:
            for entry in metadata.last_entries(count):
                if self.layout_of(entry).page_format != FP16:
                    raise QuantisedPage
            metadata.memo[WRITABLE] = True

    def view(self, entry: int) -> mx.array:
        """A view of one page in memory, uint16 [page_units, unit_words]."""
        slab, page = divmod(entry, self.slab_stride)
        units = self.slabs[slab].layout.page_units
        return self.slabs[slab].memory[page * units : (page + 1) * units]


class Backend(Protocol):
    """Operations on the pages of one layer. B sequences (rows), S new tokens, T tokens in all."""

    @property
    def name(self) -> str: ...

    @property
    def fallbacks(self) -> int:
        """How often plain MLX operations stood in for a kernel."""
        ...

    @property
    def slab_padding(self) -> int:
        """Bytes that `new_slab` allocates beyond those of the pages."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes of arrays that the backend keeps for later calls."""
        ...

    @property
    def writes_in_place(self) -> bool:
        """Whether a lazy read that is computed after a write shows the written contents."""
        ...

    @property
    def recorder(self) -> "StepRecorder | None":
        """None if MLX cannot record the operations, because they are none of its graph."""
        ...

    def supports(self, geometry: LayerGeometry) -> bool:
        """Whether the other operations work on such a layer's pages of any format."""
        ...

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        """Memory for `pages` pages, uint16 [pages * page_units, unit_words].

        Raises:
            MemoryError: the machine has too little memory.
        """
        ...

    def begin(self, *arrays: mx.array) -> None:
        """Start computing arrays that a later write of any thread waits for, if writes wait."""
        ...

    def write(
        self, pages: LayerMemory, keys: mx.array, values: mx.array, metadata: AttentionMetadata
    ) -> None:
        """Write the valid tokens of a step, keys [B, k_heads, S, k_dim] and values [B, v_heads, S,
        v_dim], as the last tokens of each sequence. Their pages must have 16 bits: `copy` recodes
        those that are full. If pages have summaries, make those of pages that are full now."""
        ...

    def load(self, pages: LayerMemory, contents: Mapping[int, mx.array]) -> None:
        """Fill whole pages (entry: uint16 [page_units, unit_words])."""
        ...

    def copy(self, pages: LayerMemory, copies: Mapping[int, int]) -> None:
        """Copy whole pages (from entry, to entry), recoding where the formats differ. No entry is
        both."""
        ...

    def gather(
        self, pages: LayerMemory, metadata: AttentionMetadata, unwritten: Unwritten | None
    ) -> tuple[mx.array, mx.array]:
        """Keys [B, k_heads, T, k_dim] and values [B, v_heads, T, v_dim]. T is the longest context
        with its right padding. Sequences are aligned to end at T, and padding is zeros. Lazy."""
        ...

    def gather_tokens(
        self, pages: LayerMemory, metadata: AttentionMetadata, indices: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Keys [B, k_heads, K, k_dim] and values [B, v_heads, K, v_dim] of the tokens at indices
        uint32 [B, K], below T, of what `gather` returns. Lazy, but for the indices. Not for
        windows."""
        ...

    def synchronize(self, pages: LayerMemory) -> None:
        """Wait until all pending operations on the pages are done, so that other code may read
        them."""
        ...

    def forget_pending(self, pages: LayerMemory) -> None:
        """Let later operations on the pages not wait for those that MLX has not computed: these
        belong to steps that were undone, and there is no memory for them."""
        ...

    def attend(
        self,
        pages: LayerMemory,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        unwritten: Unwritten | None = None,
        position_queries: mx.array | None = None,
        *,
        step: Unwritten | None = None,
    ) -> mx.array:
        """Attention of a step of queries [B, q_heads, S, k_dim] to all tokens of their sequences.
        Returns [B, q_heads, S, v_dim], finite where the step is padding.

        With `read_tokens`, a step of one token reads what `choice` chooses, unless a window or
        unwritten tokens are given, or no sequence has more tokens.

        `unwritten` are unwritten keys [B, k_heads, N, k_dim] and values [B, v_heads, N, v_dim]:
        the last tokens of each sequence, counted in its length. A `step` is such keys and values
        that are written too, see `write`: at a lower cost than by a call of its own.

        With position queries [B, q_heads, S, v_dim] it is latent attention (MLA): keys are latents
        [B, 1, T, k_dim], values are position keys [B, 1, T, v_dim], and all heads share both.
        Scores are scale * queries @ latents + position_queries @ position_keys. The output, [B,
        q_heads, S, k_dim], is the sum of latents, weighted by their softmax. All tokens are read,
        and there are neither sinks nor a softcap.
        """
        ...


class StepRecorder(Protocol):
    """Lets `mx.compile` record what a backend does in a step of one token per sequence: see
    paged_kv/steps/recorded.py.

    A recording holds no number that changes from step to step. It takes these as arrays, for each
    layer those of `arrays`, and returns the layer's `changed` ones.
    """

    @property
    def pays(self) -> bool:
        """Whether recorded steps are quicker as far as is known."""
        ...

    @property
    def backend(self) -> Backend:
        """The operations on the pages of `set_arrays`."""
        ...

    def key(self, pages: LayerMemory, tables: Tables) -> Hashable:
        """All that operations on a layer depend on besides its arrays. Equal keys have arrays of
        equal shapes and dtypes."""
        ...

    def arrays(self, pages: LayerMemory, tables: Tables) -> list[mx.array]:
        """The arrays of a layer that a step reads, writes or waits for.

        Raises:
            ThreadConflict: another thread has yet to compute them.
        """
        ...

    def set_arrays(
        self, placeholder: LayerMemory, pages: LayerMemory, tables: Tables, arrays: list[mx.array]
    ) -> None:
        """Let pages without slabs be like a layer's, with other arrays in the place of its own."""
        ...

    def changes(self, tables: Tables) -> int:
        """How many arrays `changed` returns."""
        ...

    def changed(self, placeholder: LayerMemory, tables: Tables) -> list[mx.array]:
        """The arrays of a placeholder that its operations have replaced."""
        ...

    def keep(
        self, pages: LayerMemory, tables: Tables, changed: list[mx.array], filled: list[int]
    ) -> None:
        """Let a layer have these arrays, after a recorded step that has filled the pages of these
        table entries: summarise them, if pages have summaries. A recording does not know them."""
        ...
