"""The cache that a model sees: one layer of some sequences."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from paged_kv.page_pool import PagePool
from paged_kv.paged_array import PagedKeys, PagedValues, paged_mask
from paged_kv.saved_state import restore_layer, saved_state
from paged_kv.sequence import Sequence


class PagedKVCache:
    """One layer's view of sequences, with the members that mlx-lm asks of a cache.

    It holds no memory. Copies and slices of a prompt cache are views of the same pages, and the
    pages go back to the pool when the last view of a sequence is dropped.

    Args:
        pool: where the pages are.
        layer: which of the pool's layers this is.
        sequences: the rows of the batch.
    """

    def __init__(self, pool: PagePool, layer: int, sequences: list[Sequence]) -> None:
        self.pool = pool
        self.layer = layer
        self.sequences = sequences
        self._depends_on: list[mx.array] = []

    @property
    def offset(self) -> int:
        """Tokens in the cache."""
        return self._context_lens()[0]

    def size(self) -> int:
        """Tokens in the cache."""
        return self.offset

    def empty(self) -> bool:
        """Whether nothing was written, or all of it was trimmed."""
        return self.offset == 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """Append S tokens and return all T so far.

        keys [B, k_heads, S, k_dim] and values [B, v_heads, S, v_dim] go into pages. What comes
        back are arrays [B, k_heads, T, k_dim] and [B, v_heads, T, v_dim] that attention reads
        page by page, and that are gathered when anything else looks at them.

        Raises:
            ValueError: shapes or dtypes are not what this layer holds.
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        if self._depends_on:
            keys = mx.depends(keys, self._depends_on)
        self.pool.append(self.layer, self.sequences, keys, values)
        self._depends_on = []
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[PagedKeys, PagedValues]:
        """All keys and values so far, as `update_and_fetch` returns them."""
        return self.pool.read(self.layer, self.sequences)

    @property
    def keys(self) -> mx.array:
        """All keys so far. What is assigned is computed no later than the next write: models
        assign `mx.depends(cache.keys, x)` to keep x in the graph."""
        return self.keys_and_values()[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._depends_on.append(keys)

    @property
    def values(self) -> mx.array:
        """All values so far; assigning is as for `keys`."""
        return self.keys_and_values()[1]

    @values.setter
    def values(self, values: mx.array) -> None:
        self._depends_on.append(values)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask for the next N tokens: None, "causal", or boolean [N, offset + N]."""
        if window_size is None and N == 1:
            return None
        if window_size is None and not return_array:
            return "causal"
        return paged_mask(self.offset + N, N, window_size)

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken off the end; always."""
        return True

    def trim(self, n: int) -> int:
        """Take the last n tokens off, or all if there are fewer; returns how many.

        Raises:
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"trim needs a count of tokens that is not negative, got {n}")
        n = min(n, self.offset)
        for sequence in self.sequences:
            sequence.trim(self.layer, n)
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """Refused: this version has 16-bit pages only.

        Raises:
            ValueError: always, so that a `kv_bits` is never silently ignored.
        """
        raise ValueError(
            f"kv_bits={bits} asks for quantised pages, and this version has 16-bit pages only: "
            "leave kv_bits unset"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's pages that the sequences hold, shared ones once."""
        group = self.pool.group_of(self.layer)
        pages = group.pages.get(self.layer)
        if pages is None:
            return 0
        blocks = {block for sequence in self.sequences for block in sequence.blocks(group)}
        return len(blocks) * pages.page_bytes

    @property
    def state(self) -> dict[str, Any]:
        """What saving needs, as a tree of arrays, numbers and strings.

        The arrays are views of pages: making them costs nothing, and evaluating them waits for
        what was written. Keep them no longer than that, or the next write copies a slab.
        """
        state = saved_state(self.pool, self.layer, self.sequences)
        return {**state, "depends_on": self._depends_on} if self._depends_on else state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PagedKVCache:
        """A cache from what `state` gave, maybe in another process.

        Layers of one saved sequence become one sequence again. It lives in the latest pool that
        has as many layers and the same page format, or in a pool of its own if there is none.

        Raises:
            ValueError: the state is not one of this version's.
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        pool, layer, sequences = restore_layer(state)
        return cls(pool, layer, sequences)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A fork: it shares all pages until one of the two writes."""
        forks = [sequence.fork(self.layer) for sequence in self.sequences]
        return type(self)(self.pool, self.layer, forks)

    def __repr__(self) -> str:
        return f"PagedKVCache(layer={self.layer}, offset={self.offset})"

    def _context_lens(self) -> list[int]:
        return [sequence.context_lens[self.layer] for sequence in self.sequences]
