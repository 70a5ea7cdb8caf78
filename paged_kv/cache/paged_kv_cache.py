"""The cache that a model sees: one layer of some sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from paged_kv.cache.saved_state import restore_layer, saved_state
from paged_kv.checks import described
from paged_kv.kernels.pages.number_format import GROUP
from paged_kv.kernels.pages.page_format import page_format_named
from paged_kv.kernels.pages.warn_once import warn_once
from paged_kv.pool.page_pool import PagePool, require_pool
from paged_kv.sequences.masks import step_mask
from paged_kv.sequences.paged_array import PagedKeys, PagedValues
from paged_kv.sequences.sequence import Sequence
from paged_kv.sequences.step import Step
from paged_kv.sequences.steps import append, begin_step, convert, read


class PagedKVCache:
    """One layer's view of sequences, with the members that mlx-lm asks of a cache.

    It holds no memory. Copies and slices of a prompt cache are views of the same pages, and the
    pages go back to the pool when the last view of a sequence is dropped.

    Args:
        pool: where the pages are.
        layer: which of the pool's layers this is.
        sequences: the rows of the batch.

    Raises:
        TypeError: `pool` is no pool, or `sequences` are not of it.
        ValueError: the pool has no such layer.
    """

    def __init__(self, pool: PagePool, layer: int, sequences: list[Sequence]) -> None:
        require_pool("pool", pool)
        if layer not in range(pool.num_layers):
            raise ValueError(
                f"layer must be one of the pool's {pool.num_layers}, which count from 0, got "
                f"{described(layer)}"
            )
        if not all(isinstance(each, Sequence) and each.pool is pool for each in sequences):
            raise TypeError("sequences must be a list of Sequences of the same pool")
        self.pool = pool
        self.layer = layer
        self.sequences = sequences
        self._depends_on: list[mx.array] = []
        # Sequences do not hold the step that they take part in.
        self._step: Step | None = None

    @property
    def offset(self) -> int | mx.array:
        """The position of the next token: a number for one sequence, int32 [B] for a batch."""
        sequences, layer = self.sequences, self.layer
        step = sequences[0].step() if sequences else None
        if isinstance(step, Step) and layer in step.layers and step.sequences == sequences:
            return step.offset_before if layer in step.waiting else step.offset_after
        offsets = [sequence.offset(layer) for sequence in sequences]
        return offsets[0] if len(offsets) == 1 else mx.array(offsets, dtype=mx.int32)

    def size(self) -> int:
        """Tokens of the longest sequence."""
        return max((sequence.context_lens[self.layer] for sequence in self.sequences), default=0)

    def empty(self) -> bool:
        """Whether nothing was written, or all of it was trimmed."""
        return self.size() == 0

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
        sequences = self.sequences
        step = sequences[0].step() if sequences else None
        if (
            isinstance(step, Step)
            and self.layer in step.waiting
            and step.shape == keys.shape[::2]
            and step.sequences == sequences
        ):
            arrays = step.write(self.layer, keys, values)
        else:
            arrays = self._append(keys, values)
        if self._depends_on:
            self._depends_on = []
        return arrays

    def _append(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """Begin a step with these tokens."""
        sequences = self.sequences
        if len(sequences) == 1 and self.empty() and keys.shape[0] > 1:
            # A new prompt cache takes a batch of any size.
            sequences = sequences[0].batch_of(keys.shape[0])
        arrays = append(self.pool, self.layer, sequences, keys, values)
        # Not before: after a step that failed it still is a new one.
        self.sequences = sequences
        step = sequences[0].step() if sequences else None
        self._step = step if isinstance(step, Step) else None
        return arrays

    def keys_and_values(self) -> tuple[PagedKeys, PagedValues]:
        """All keys and values so far, as `update_and_fetch` returns them."""
        return read(self.pool, self.layer, self.sequences)

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
        """The mask for the next N tokens.

        For one sequence None, "causal", or boolean [N, offset + N]; for a batch always boolean
        [B, 1, N, T], T the longest of the rows after these tokens.

        Models ask for masks before any layer writes, so the blocks that the step needs are
        reserved here: if there are none, no layer of any kind has changed yet. A new cache that is
        then given a batch is one sequence here, so the others' blocks are reserved at its first
        write.

        Raises:
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        step = self._step_of_model(N)
        window = self.pool.windows.get(self.layer)
        return step_mask(step.rows, N, window, return_array=return_array, window_size=window_size)

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken off the end: always without a window, and with one as far
        as it has not written over what it would need."""
        return self.empty() or self.can_trim(1)

    def can_trim(self, n: int) -> bool:
        """Whether n tokens can be taken off every sequence, or all of one that has fewer."""
        return all(
            min(n, sequence.context_lens[self.layer]) <= sequence.rollback
            for sequence in self.sequences
        )

    def trim(self, n: int) -> int:
        """Take the last n tokens off every sequence, or all of one that has fewer; returns the
        most that were taken off one.

        Raises:
            ValueError: n is negative.
        """
        return max(self.trim_per_sequence([n] * len(self.sequences)), default=0)

    def trim_per_sequence(self, n: list[int] | mx.array) -> list[int]:
        """Take the last n[i] tokens off sequence i, or all if it has fewer; returns how many.

        n is a list or an integer array [B].

        Raises:
            ValueError: there are not B counts, or one is negative; nothing was changed.
            RollbackError: a window has passed what one of them would need; nothing was changed.
        """
        counts = _integers(n)
        if len(counts) != len(self.sequences):
            raise ValueError(
                f"trim needs one count for each of {len(self.sequences)} sequences, "
                f"got {len(counts)}"
            )
        if min(counts, default=0) < 0:
            raise ValueError(
                f"trim needs counts of tokens that are not negative, got {min(counts)}"
            )
        pairs = list(zip(self.sequences, counts, strict=True))
        for sequence, count in pairs:
            sequence.require_rollback(self.layer, count)
        return [sequence.trim(self.layer, count) for sequence, count in pairs]

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce padding in the steps to come, which no page will hold; one number a sequence.

        Args:
            left_padding: how many of the next tokens are padding.
            lengths: how many tokens follow until padding does.
            right_padding: how many tokens of padding that is. Without `lengths` it is not known
                where they begin: they are written, and trimmed by `finalize`.

        Raises:
            ValueError: there are not as many numbers as sequences, or a sequence that has tokens
                is given padding on the left; nothing was changed.
        """
        batch = len(self.sequences)
        for name, numbers in (
            ("left_padding", left_padding),
            ("lengths", lengths),
            ("right_padding", right_padding),
        ):
            if numbers is not None and len(numbers) != batch:
                raise ValueError(f"{name} needs {batch} numbers, one a sequence, got {numbers}")
        self._require_empty(left_padding or [0] * batch)
        is_padded = right_padding is not None and any(right_padding)
        for row, sequence in enumerate(self.sequences):
            padding = sequence.padding[self.layer]
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
        """Keep these sequences, in this order; one that is named again is forked.

        Raises:
            IndexError: there is no such sequence; nothing was changed.
        """
        kept = [self.sequences[index] for index in _integers(batch_indices)]
        self.sequences, self._step = self._distinct(kept), None

    def extend(self, other: PagedKVCache) -> None:
        """Take over the other cache's sequences, as rows behind this one's.

        Raises:
            ValueError: they are not in the same layer of the same pool.
        """
        self._require_same_pages(other)
        self.sequences = self._distinct(self.sequences + other.sequences)

    def extract(self, idx: int) -> PagedKVCache:
        """A fork of one sequence, as a cache of its own."""
        return type(self)(self.pool, self.layer, [self.sequences[idx].fork(self.layer)])

    @classmethod
    def merge(cls, caches: list[PagedKVCache]) -> PagedKVCache:
        """A batch of forks of all caches' sequences; the caches themselves stay as they are.

        Raises:
            ValueError: they are not in the same layer of the same pool, or there are none.
        """
        if not caches:
            raise ValueError("merge needs at least one cache, got an empty list")
        first = caches[0]
        for other in caches[1:]:
            first._require_same_pages(other)
        sequences = [sequence for cache in caches for sequence in cache.sequences]
        forks = [sequence.fork(first.layer) for sequence in sequences]
        return cls(first.pool, first.layer, forks)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """Turn the pages of these sequences, in all layers, into 4-bit or 8-bit ones; returns
        this same cache, so whoever holds it sees every later token.

        mlx-lm calls this at every step for every layer, once `kv_bits` is given; after the first
        time it costs nothing. Pages have 32 numbers to a scale whatever `group_size` says.

        Raises:
            ValueError: `bits` is not 4 or 8, or a head size does not divide by 32; nothing was
                changed.
            PoolExhausted: see `PagePool.convert`.
        """
        if bits not in (4, 8):
            raise ValueError(f"kv_bits must be 4 or 8 with paged caches, got {bits}")
        if group_size != GROUP:
            warn_once(
                f"kv_group_size={group_size} is not used: quantised pages have one scale for "
                f"{GROUP} numbers"
            )
        convert(self.pool, self.sequences, page_format_named(f"q{bits}"))
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's pages that the sequences hold, shared ones once."""
        group = self.pool.group_of(self.layer)
        pages = group.pages.get(self.layer)
        if pages is None:
            return 0
        blocks = {block for sequence in self.sequences for block in sequence.blocks(group)}
        return sum(pages.layout_of(block).page_bytes for block in blocks)

    @property
    def state(self) -> dict[str, Any]:
        """What saving needs, as a tree of arrays, numbers and strings.

        The arrays are views of pages: making them costs nothing, and evaluating them waits for
        what was written. Keep them no longer than that: the next write shows in them, or has to
        copy a slab.
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
        lengths = [sequence.context_lens[self.layer] for sequence in self.sequences]
        return f"PagedKVCache(layer={self.layer}, context_lens={lengths})"

    def _step_of_model(self, count: int) -> Step:
        """The next step, which a model takes; begun here unless another layer has."""
        sequences = self.sequences
        step = sequences[0].step() if sequences else None
        if (
            not isinstance(step, Step)
            or self.layer not in step.waiting
            or step.shape != (len(sequences), count)
            or step.sequences != sequences
        ):
            step = begin_step(self.pool, self.layer, sequences, count)
        step.begin_in_model(self.layer)
        self._step = step
        return step

    def _require_empty(self, left_padding: list[int]) -> None:
        """As mlx-lm's caches do: a step's padding would lie between tokens."""
        for row, (sequence, count) in enumerate(zip(self.sequences, left_padding, strict=True)):
            if count and (length := sequence.context_lens[self.layer]):
                raise ValueError(
                    f"left_padding must be 0 for a sequence that has tokens: sequence {row} has "
                    f"{length} and was given {count}: pad on the right, with lengths and "
                    "right_padding"
                )

    def _distinct(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences, with a fork for each that appeared before: rows are written alone."""
        seen: set[Sequence] = set()
        rows = []
        for sequence in sequences:
            rows.append(sequence.fork(self.layer) if sequence in seen else sequence)
            seen.add(sequence)
        return rows

    def _require_same_pages(self, other: PagedKVCache) -> None:
        if not isinstance(other, PagedKVCache):
            raise ValueError(f"a PagedKVCache cannot be batched with a {type(other).__name__}")
        if (self.pool, self.layer) != (other.pool, other.layer):
            raise ValueError(
                f"caches can be batched within one layer of one pool, got layer {self.layer} of "
                f"{self.pool} and layer {other.layer} of {other.pool}: make them with one factory"
            )


def _integers(numbers: Iterable[int] | mx.array) -> list[int]:
    listed: Any = numbers.tolist() if isinstance(numbers, mx.array) else numbers
    return list(listed)
