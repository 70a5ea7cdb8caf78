"""Implements mlx-lm's cache protocol: one layer of a list of sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from paged_kv.cache.saved_state import restore_layer, saved_state
from paged_kv.checks import described
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.pages.number_format import GROUP
from paged_kv.kernels.pages.page_format import page_format_named
from paged_kv.pool.page_pool import PagePool, require_pool
from paged_kv.steps.batch import Batch, integers, write
from paged_kv.steps.metadata import step_mask
from paged_kv.steps.read import (
    PagedKeys,
    PagedValues,
    dependencies_of,
    depending,
    joined,
    this_thread,
)
from paged_kv.steps.sequence import Sequence, offset_of


class PagedKVCache:
    """One layer's view of sequences, with the members of mlx-lm's caches.

    It holds no memory. Copies and slices of a prompt cache are views of the same pages. The pool
    gets the pages back when the last view of a sequence is dropped.

    Args:
        pool: the pool that holds the pages.
        layer: the layer's number in the pool.
        sequences: the sequences of the batch.

    Attributes:
        batch: those sequences and their current step, which all layers share.
        dependency: what the next write depends on, as arrays were assigned to `keys` or `values`;
            None if nothing was.

    Raises:
        TypeError: `pool` is no pool, or a sequence belongs to another pool.
        ValueError: the pool has no such layer.
    """

    def __init__(self, pool: PagePool, layer: int, sequences: Iterable[Sequence]) -> None:
        require_pool("pool", pool)
        if layer not in range(pool.num_layers):
            raise ValueError(
                f"layer must be one of the pool's {pool.num_layers}, which count from 0, got "
                f"{described(layer)}"
            )
        rows = tuple(sequences)
        if not all(isinstance(each, Sequence) and each.pool is pool for each in rows):
            raise TypeError("sequences must be Sequences of the same pool")
        self.pool = pool
        self.layer = layer
        self.batch = Batch.of(pool, rows)
        self.dependency: mx.array | None = None

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return self.batch.sequences

    @property
    def offset(self) -> int | mx.array:
        """The position of the next token: a number for one sequence, int32 [B] for a batch."""
        layer, step = self.layer, self.batch.step
        if step is not None and step.is_open:
            if layer in step.waiting:
                return step.offset_before
            if layer in step.layers:
                return step.offset_after
        return offset_of([sequence.progress(layer).offset for sequence in self.sequences])

    def size(self) -> int:
        """Tokens of the longest sequence."""
        return max([each.progress(self.layer).tokens for each in self.sequences], default=0)

    def empty(self) -> bool:
        """Whether nothing was written, or all of it was trimmed."""
        return self.size() == 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """Append S tokens and return all T so far.

        Writes keys [B, k_heads, S, k_dim] and values [B, v_heads, S, v_dim] to pages. Returns
        arrays [B, k_heads, T, k_dim] and [B, v_heads, T, v_dim], which attention reads page by
        page. In layers where other code uses them too, they are gathered when computed.

        Raises:
            ValueError: shapes or dtypes do not fit this layer.
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        if self.dependency is not None:
            keys = mx.depends(keys, self.dependency)
        step, layer = self.batch.step, self.layer
        is_begun = step is not None and step.is_open and layer in step.waiting
        if step is not None and is_begun and step.shape == keys.shape[::2]:
            arrays = write(step, layer, keys, values)
        else:
            arrays = self._append(keys, values)
        self.dependency = None
        return arrays

    def _append(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        batch = self.batch
        if keys.shape[0] > 1 == len(batch.sequences) and self.empty():
            # A new prompt cache takes a batch of any size.
            batch = batch.widened(keys.shape[0])
        arrays = batch.append(self.layer, keys, values)
        # Not earlier: after a failed step, this is still a new cache.
        self.batch = batch
        return arrays

    def keys_and_values(self) -> tuple[PagedKeys, PagedValues]:
        """All keys and values so far, as `update_and_fetch` returns them."""
        return self.batch.read(self.layer)

    @property
    def keys(self) -> mx.array:
        """All keys so far. What an assigned array depends on is computed no later than the next
        write: models assign `mx.depends(cache.keys, x)` to keep x in the graph. New
        contents are refused with a ValueError."""
        return self._looked_at()[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._depend_on_assigned(keys)

    @property
    def values(self) -> mx.array:
        """All values so far; assign as to `keys`."""
        return self._looked_at()[1]

    @values.setter
    def values(self, values: mx.array) -> None:
        self._depend_on_assigned(values)

    def depend_on(self, caches: Iterable[PagedKVCache]) -> None:
        """Let the next write depend on whatever those of other caches depend on."""
        self.dependency = joined([self.dependency, *[each.dependency for each in caches]])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask for the next N tokens.

        For one sequence None, "causal", or boolean [N, offset + N]; for a batch always boolean
        [B, 1, N, T], T the length of the longest sequence after these tokens.

        Models ask for masks before any layer writes, so this reserves the blocks of the step: if
        it raises, no layer has changed yet. A new cache has one sequence here even if a batch
        follows; the first write reserves the blocks of the others.

        Raises:
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        step = self.batch.begin(self.layer, N)
        step.begin_in_model()
        window = self.pool.windows.get(self.layer)
        return step_mask(step.rows, N, window, return_array=return_array, window_size=window_size)

    def is_trimmable(self) -> bool:
        """Whether the last token can be trimmed: always without a window; with a window, unless the
        ring has overwritten tokens that would be needed."""
        return self.empty() or self.can_trim(1)

    def can_trim(self, n: int) -> bool:
        """Whether `trim(n)` would succeed."""
        return all(
            min(n, sequence.progress(self.layer).tokens) <= sequence.rollback
            for sequence in self.sequences
        )

    def trim(self, n: int) -> int:
        """Remove the last n tokens of every sequence, or all if it has fewer; returns the largest
        number removed.

        Raises:
            ValueError: n is negative.
        """
        return max(self.trim_per_sequence([n] * len(self.sequences)), default=0)

    def trim_per_sequence(self, n: list[int] | mx.array) -> list[int]:
        """Remove the last n[i] tokens of sequence i, or all if it has fewer; returns how many.

        n is a list or an integer array [B].

        Raises:
            ValueError: there are not B counts, or one is negative; nothing was changed.
            RollbackError: a ring has overwritten tokens that would be needed; nothing was changed.
        """
        counts, batch = integers(n), len(self.sequences)
        if len(counts) != batch:
            raise ValueError(f"trim needs one count per sequence ({batch}), got {len(counts)}")
        if min(counts, default=0) < 0:
            raise ValueError(
                f"trim needs counts of tokens that are not negative, got {min(counts)}"
            )
        pairs = list(zip(self.sequences, counts, strict=True))
        for sequence, count in pairs:
            sequence.layers.require_rollback(self.layer, count)
        return [sequence.trim(self.layer, count) for sequence, count in pairs]

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce padding in the coming steps, which no page will hold. Each list has one number
        per sequence.

        Args:
            left_padding: how many of the next tokens are padding.
            lengths: how many tokens follow before the right padding.
            right_padding: how many padding tokens follow. Without `lengths` their start is unknown:
                they are written, and `finalize` trims them.

        Raises:
            ValueError: a list has not one number per sequence, or a sequence that has tokens gets
                left padding; nothing was changed.
        """
        batch = len(self.sequences)
        for name, numbers in (
            ("left_padding", left_padding),
            ("lengths", lengths),
            ("right_padding", right_padding),
        ):
            if numbers is not None and len(numbers) != batch:
                raise ValueError(f"{name} needs one number per sequence ({batch}), got {numbers}")
        # Padding would lie between tokens. mlx-lm's caches refuse it too.
        for row, count in enumerate(left_padding or ()):
            if count and (length := self.sequences[row].progress(self.layer).tokens):
                raise ValueError(
                    f"left_padding must be 0 for a sequence that has tokens: sequence {row} has "
                    f"{length} and was given {count}: pad on the right, with lengths and "
                    "right_padding"
                )
        is_padded = right_padding is not None and any(right_padding)
        for row, sequence in enumerate(self.sequences):
            padding = sequence.progress(self.layer).padding
            if left_padding is not None:
                padding = replace(padding, left=padding.left + left_padding[row])
            if is_padded and lengths is not None:
                padding = replace(padding, tokens=lengths[row])
            elif is_padded and right_padding is not None:
                padding = replace(padding, to_trim=right_padding[row])
            sequence.prepare(self.layer, padding)

    def finalize(self) -> None:
        """End the steps that `prepare` announced."""
        for sequence in self.sequences:
            sequence.finalize(self.layer)

    def filter(self, batch_indices: list[int] | mx.array) -> None:
        """Keep these sequences, in this order; a repeated one is forked.

        Raises:
            IndexError: there is no such sequence; nothing was changed.
        """
        kept = [self.sequences[index] for index in integers(batch_indices)]
        self.batch = Batch.of(self.pool, self._distinct(kept))

    def extend(self, other: Any) -> None:
        """Append the other cache's sequences to the batch. Of one without pages, such as mlx-lm's
        `KVCache` and `BatchKVCache`, the keys and values are written to pages.

        Raises:
            ValueError: they are not in the same layer of the same pool; or they have no pages, and
                do not fit the layer or hold only their latest tokens.
            PoolExhausted: the pool's budget does not hold what has no pages.
        """
        if isinstance(other, PagedKVCache):
            self._require_same_pages(other)
            self.depend_on([other])
            others = list(other.sequences)
        else:
            others = self.batch.take_in(self.layer, other)
        self.batch = Batch.of(self.pool, self._distinct([*self.sequences, *others]))

    def extract(self, idx: int) -> PagedKVCache:
        """A fork of one sequence, as a cache of its own."""
        return self._with([self.sequences[idx].fork(self.layer)], [self])

    @classmethod
    def merge(cls, caches: list[Any]) -> PagedKVCache:
        """A batch of forks of all caches' sequences; the caches themselves stay as they are. Some
        may have no pages, as for `extend`.

        Raises:
            ValueError: there is none with pages; otherwise as for `extend`.
            PoolExhausted: as for `extend`.
        """
        paged = [each for each in caches if isinstance(each, PagedKVCache)]
        if not paged:
            raise ValueError(f"merge needs at least one cache with pages, got {described(caches)}")
        first = paged[0]
        for other in paged:
            first._require_same_pages(other)
        sequences: list[Sequence] = []
        for cache in caches:
            if isinstance(cache, PagedKVCache):
                sequences += [sequence.fork(first.layer) for sequence in cache.sequences]
            else:
                sequences += first.batch.take_in(first.layer, cache)
        return first._with(sequences, paged)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """Requantise the pages of these sequences, in all layers, to 4 or 8 bits, and the first of
        each to 8. Returns this same cache, so that other references to it see every later token.

        With `kv_bits`, mlx-lm calls this at every step for every layer; only the first call does
        work. Pages have groups of their own, whatever `group_size` says.

        Raises:
            ValueError: `bits` is not 4 or 8, or a head size does not divide by 32; nothing was
                changed.
            PoolExhausted: see `PagePool.convert`.
        """
        if bits not in (4, 8):
            raise ValueError(f"kv_bits must be 4 or 8 with paged caches, got {bits}")
        if (group_size, bits) != (GROUP, 8):
            warn_once(
                f"kv_group_size={group_size} is not used: quantised pages have their own groups"
            )
        self.batch.convert(page_format_named(f"q{bits}"))
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's pages that the sequences hold; shared pages count once."""
        group = self.pool.group_of(self.layer)
        pages = group.pages.get(self.layer)
        if pages is None:
            return 0
        blocks = {block for sequence in self.sequences for block in sequence.blocks(group)}
        return sum(pages.layout_of(block).page_bytes for block in blocks)

    def compute(self) -> None:
        """Compute the latest step. Unlike reading `state`, this leaves the step open, so that it
        can be undone if it fails.

        Raises:
            RuntimeError: MLX has no memory for it.
            ThreadConflict: another thread has to compute it.
        """
        layer, pages = self.layer, self.pool.group_of(self.layer).pages.get(self.layer)
        if pages is not None:
            unwritten = [each.unwritten.get(layer) for each in self.sequences]
            mx.eval([each.step for each in unwritten if each is not None])
            pages.compute()

    @property
    def state(self) -> dict[str, Any]:
        """The cache as a tree of arrays, numbers and strings, for saving.

        The arrays are views of pages; evaluating them waits for pending writes. Do not keep them:
        the next write shows in them, or has to copy a slab.
        """
        state = saved_state(self.pool, self.layer, list(self.sequences))
        return state if self.dependency is None else {**state, "depends_on": self.dependency}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PagedKVCache:
        """A cache from a `state`, possibly of another process.

        Layers of one saved sequence become one sequence again. It goes to an open pool with the
        same number of layers, windows and geometry: best to one of the model that computed it, then
        to one of its page format, then to the latest; or else to a new pool.

        Raises:
            ValueError: another version saved the state.
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        pool, layer, sequences = restore_layer(state)
        return cls(pool, layer, sequences)

    def __copy__(self) -> PagedKVCache:
        """A fork: it shares all pages until one of the two writes."""
        return self._with([sequence.fork(self.layer) for sequence in self.sequences], [self])

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        return self.__copy__()

    def __repr__(self) -> str:
        lengths = [sequence.progress(self.layer).tokens for sequence in self.sequences]
        return f"PagedKVCache(layer={self.layer}, context_lens={lengths})"

    def _with(self, sequences: list[Sequence], sources: list[PagedKVCache]) -> PagedKVCache:
        """A cache of these sequences, which depends on what its sources depend on."""
        cache = type(self)(self.pool, self.layer, sequences)
        cache.depend_on(sources)
        return cache

    def _looked_at(self) -> list[mx.array]:
        """As `keys_and_values`, which count as gathered for attention only within a model."""
        arrays = self.batch.read(self.layer, counted=this_thread.in_model)
        if self.dependency is None:
            return list(arrays)
        return [depending(array, [self.dependency]) for array in arrays]

    def _depend_on_assigned(self, array: mx.array) -> None:
        # Without a factory nobody knows when a model runs.
        found = dependencies_of(array, is_checked=self.pool.versions is not None)
        self.dependency = joined([self.dependency, *found])

    def _distinct(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences, with a fork for each repeated one: each row is written separately."""
        seen: set[Sequence] = set()
        rows = []
        for sequence in sequences:
            rows.append(sequence.fork(self.layer) if sequence in seen else sequence)
            seen.add(sequence)
        return rows

    def _require_same_pages(self, other: PagedKVCache) -> None:
        if (self.pool, self.layer) != (other.pool, other.layer):
            raise ValueError(
                f"caches can be batched within one layer of one pool, got layer {self.layer} of "
                f"{self.pool} and layer {other.layer} of {other.pool}: make them with one factory"
            )


class PagedChunkedKVCache(PagedKVCache):
    """One layer that attends by chunks, with the members of mlx-lm's `ChunkedKVCache`.

    The pages are a ring that holds a chunk's length of tokens. The model makes the mask from
    `start_position` and `offset`, two numbers, so it takes one sequence of a batch at a time.
    """

    @property
    def start_position(self) -> int:
        """The position of the first token that `update_and_fetch` will return.

        Raises:
            ValueError: the cache holds several sequences, each with a position of its own.
        """
        if len(self.sequences) != 1:
            raise ValueError(
                f"a layer that attends by chunks takes one sequence, this cache has "
                f"{len(self.sequences)}: give each sequence a cache of its own"
            )
        window = self.pool.group_of(self.layer).window
        before = self.sequences[0].progress(self.layer).offset
        return 0 if window is None else window.first_visible(before)

    def maybe_trim_front(self) -> None:
        """Does nothing: the ring overwrites the tokens that its window has passed."""
