"""A model with a prediction head, whose keys and values are one more layer of the model's pages.

The head's layer takes every step that the model's layers take. So batches, trims, forks, prefixes,
preemption and stores treat it as they treat any other layer. What it writes for a token depends on
that token and on the hidden state before it alone: its attention is computed only where it drafts.
To draft, the head's layer takes steps alone, and is trimmed to the other layers again.

A head may not pay, so it must cost next to nothing where it does not draft. In steps of few tokens
its layer takes zeros; the head reads their tokens, all together, when it drafts, or when a page is
about to be full. So full pages, which others may share, are always read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.heads.latest_tokens import (
    MOST_UNREAD,
    LatestTokens,
    Place,
    TakenStep,
    gathered,
    places_of_step,
)
from paged_kv.integrations.heads.model_parts import ModelParts
from paged_kv.integrations.heads.noted_outputs import hook_outputs, outputs_of
from paged_kv.integrations.heads.prediction_head import PredictionHead
from paged_kv.integrations.model_hooks import Undo, call_all
from paged_kv.kernels.pages.page_format import PAGE_SIZE, LayerGeometry
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.progress import NO_PADDING, Padding
from paged_kv.steps.sequence import Sequence


class ModelHead:
    """A head beside its model.

    Args:
        model: the language model.
        head: its head; it is converted to the dtype of the model's embeddings.

    Raises:
        ValueError: the model has no place for a head, or the head is of another model.

    Attributes:
        geometry: of the keys and values of the head's layer.
    """

    def __init__(self, model: Module, head: PredictionHead) -> None:
        self.head = head
        self.parts = ModelParts(model)
        like = self.parts.embed(mx.array([[0]]))
        self._require_shape("hidden states of width", self.parts.hidden_size, head.hidden_size)
        self._require_shape("a vocabulary of", self.parts.vocab_size, head.vocab_size)
        head.set_dtype(like.dtype)
        layers = self.parts.backbone.layers
        read = [layers[each] for each in head.layers_read(len(layers))]
        self.modules: list[Module] = read or [self.parts.backbone]
        nothing = mx.zeros((1, self.parts.hidden_size), like.dtype)
        self._nothing = TakenStep(mx.zeros((1,), mx.int32), nothing)
        self.geometry = self._geometry(nothing[None])

    @staticmethod
    def _require_shape(what: str, of_model: int, of_head: int) -> None:
        if of_model != of_head:
            raise ValueError(
                f"the head is for a model with {what} {of_head:,}, and this model has "
                f"{of_model:,}: give the head that was trained for this model"
            )

    def _geometry(self, like: mx.array) -> LayerGeometry:
        """Symbolic: nothing is computed."""
        shown = _Shown()
        self.head(like, like, shown)
        assert shown.geometry is not None, "a head has a layer with keys and values"
        return shown.geometry

    def hook(self) -> Undo:
        """Let the modules that the head reads note what they return."""
        return partial(call_all, [hook_outputs(kind) for kind in set(map(type, self.modules))])

    @contextmanager
    def step(self, tokens: mx.array | None, cache: PagedKVCache) -> Iterator[None]:
        """Take a step that the model's layers take within, if they take one.

        Args:
            tokens: [B, S]; None if the model is given embeddings alone.
            cache: of the head's layer.

        Raises:
            PoolExhausted: there are no pages for it; nothing was changed.
        """
        may_wait = tokens is not None and self._may_wait(cache.sequences, tokens.shape[1])
        if not may_wait:
            self.read_waiting(cache.sequences)
        with outputs_of(self.modules) as outputs:
            yield
        if not outputs:
            return
        hidden = self.head.joined(outputs)
        paddings = [sequence.progress(cache.layer).padding for sequence in cache.sequences]
        # A new cache takes a batch of any size.
        paddings += [NO_PADDING] * (len(hidden) - len(paddings))
        taken, places = places_of_step(tokens, hidden, paddings)
        if may_wait:
            cache.update_and_fetch(*_zeros(self.geometry, *hidden.shape[:2]))
        else:
            self._read_step(tokens, hidden, cache, taken, paddings)
        for sequence, each in zip(cache.sequences, places, strict=True):
            latest = _latest_of(sequence)
            latest.take(_length(sequence) - len(each), each, is_read=not may_wait)

    def read_waiting(self, sequences: Iterable[Sequence], more_than: int = 0) -> None:
        """Read what the head has not read, of the sequences with more such tokens than that.

        Raises:
            PoolExhausted: there are no pages for it, as others share them; nothing was changed.
        """
        waiting = [each for each in sequences if _unread(each) > more_than]
        if waiting:
            cache, unread = _cache_of(waiting), [*map(_unread, waiting)]
            with _alone(cache, unread):
                self._read_unread(cache, unread)
            self._note_read(waiting)

    def draft(self, sequences: Rows[Sequence], last: list[int], count: int) -> mx.array:
        """The `count` tokens [B, count] that the head expects after a token behind each sequence.

        Raises:
            PoolExhausted: there are no pages for them; nothing was changed.
        """
        cache, unread = _cache_of(sequences), [*map(_unread, sequences)]
        with _alone(cache, unread):
            hidden = self._read_unread(cache, unread, last)
            token = self.head.likeliest(hidden, self.parts)[:, 0]
            drafted = [token]
            for _ in range(count - 1):
                hidden = self.head(self.parts.embed(token[:, None]), hidden, cache)
                token = self.head.likeliest(hidden, self.parts)[:, 0]
                drafted.append(token)
            found = mx.stack(drafted, axis=1)
            mx.eval(found)
        self._note_read(sequences)
        return found

    def _may_wait(self, sequences: Rows[Sequence], count: int) -> bool:
        """Whether the head may leave a step of so many tokens unread."""
        in_rings = sequences[0].pool.longest_rollback
        most = MOST_UNREAD if in_rings is None else min(MOST_UNREAD, in_rings)
        return count <= most and all(
            _unread(each) + count <= most and _length(each) % PAGE_SIZE + count < PAGE_SIZE
            for each in sequences
        )

    def _read_unread(
        self, cache: PagedKVCache, unread: list[int], last: list[int] | None = None
    ) -> mx.array:
        """Take a step of the head's layer alone, of the tokens that it has not read and of one more
        behind each sequence; returns the states [B, 1, hidden_size] of the last of each.

        Args:
            cache: of the layer, without these tokens.
            unread: how many tokens of each sequence were not read.
            last: the tokens behind them; None for none, and then the states tell nothing.
        """
        more = 0 if last is None else 1
        tokens, before = [], []
        for sequence, count in zip(cache.sequences, unread, strict=True):
            start, latest = _length(sequence), _latest_of(sequence)
            before.append(latest.between(start - 1, start - 1 + count + more))
            tokens.append(latest.between(start, start + count))
        if last is not None:
            behind = TakenStep(mx.array(last), self._nothing.hidden)
            tokens = [[*each, Place(behind, row)] for row, each in enumerate(tokens)]
        counts = [count + more for count in unread]
        padding = [max(counts) - count for count in counts]
        if any(padding):
            cache.prepare(lengths=counts, right_padding=padding)
        embeddings = self.parts.embed(gathered(tokens, self._nothing, "tokens"))
        hidden = gathered(before, self._nothing, "hidden")
        states = self.head(embeddings, hidden, _Written(cache) if last is None else cache)
        if any(padding):
            cache.finalize()
            ends = mx.array(counts)[:, None, None] - 1
            return mx.take_along_axis(states, ends, axis=1)
        return states[:, -1:]

    def _read_step(
        self,
        tokens: mx.array | None,
        hidden: mx.array,
        cache: PagedKVCache,
        taken: TakenStep,
        paddings: list[Padding],
    ) -> None:
        """Read a step that the model has taken, of which `taken` is kept."""
        before = self._before(cache.sequences, len(hidden))
        embeddings = mx.zeros_like(hidden) if tokens is None else self.parts.embed(tokens)
        previous = mx.concatenate([before, hidden[:, :-1]], axis=1)
        if any(padding.left for padding in paddings):
            firsts = mx.array([padding.left for padding in paddings])[:, None]
            is_first = mx.arange(hidden.shape[1]) == firsts
            previous = mx.where(is_first[:, :, None], before, previous)
        # Computed with the keys: else what is kept would hold all of the step until it is read.
        self.head(embeddings, previous, _Written(cache, taken.hidden))

    def _before(self, sequences: Rows[Sequence], rows: int) -> mx.array:
        """The hidden states [B, 1, hidden_size] of the sequences' last tokens; zeros where they are
        not known, as behind a prefix that was found."""
        if len(sequences) != rows:
            return mx.broadcast_to(self._nothing.hidden, (rows, 1, self._nothing.hidden.shape[1]))
        lengths = map(_length, sequences)
        places = [
            _latest_of(sequence).between(length - 1, length)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        return gathered(places, self._nothing, "hidden")

    def _note_read(self, sequences: Rows[Sequence]) -> None:
        for sequence in sequences:
            _latest_of(sequence).note_read(_length(sequence))


def _cache_of(sequences: Rows[Sequence]) -> PagedKVCache:
    """The cache of the head's layer."""
    pool = sequences[0].pool
    return PagedKVCache(pool, pool.num_layers - 1, sequences)


def _length(sequence: Sequence) -> int:
    """The tokens that the head's layer holds of a sequence."""
    return sequence.progress(sequence.pool.num_layers - 1).tokens


def _latest_of(sequence: Sequence) -> LatestTokens:
    if sequence.of_head is None:
        sequence.of_head = LatestTokens(_length(sequence))
    latest: LatestTokens = sequence.of_head
    return latest


def _unread(sequence: Sequence) -> int:
    """How many tokens of a sequence the head has not read."""
    return _latest_of(sequence).unread(_length(sequence))


@contextmanager
def _alone(cache: PagedKVCache, unread: list[int]) -> Iterator[None]:
    """Let a layer take steps alone, without padding, from before its last tokens on. It ends with
    as many tokens as it had, whatever happens."""
    layer, sequences = cache.layer, cache.sequences
    before = [sequence.progress(layer) for sequence in sequences]
    try:
        cache.trim_per_sequence(unread)
        for sequence in sequences:
            sequence.prepare(layer, NO_PADDING)
        yield
    finally:
        for sequence, progress in zip(sequences, before, strict=True):
            more = sequence.progress(layer).tokens - progress.tokens
            sequence.trim(layer, max(0, more))
            # Fewer if it has failed: then its pages still hold what they held.
            sequence.layers.set(layer, progress._replace(latest=0))


@lru_cache(maxsize=8)
def _zeros(geometry: LayerGeometry, rows: int, count: int) -> tuple[mx.array, mx.array]:
    """Keys and values of so many tokens."""
    keys = mx.zeros((rows, geometry.k_heads, count, geometry.k_dim), geometry.k_dtype)
    values = mx.zeros((rows, geometry.v_heads, count, geometry.v_dim), geometry.v_dtype)
    mx.eval(keys, values)
    return keys, values


class _Shown:
    """A cache that notes the geometry of what it is given."""

    offset = 0
    geometry: LayerGeometry | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.geometry = LayerGeometry.of(keys, values)
        return keys, values


class _Written:
    """A cache that writes keys and values, and gives back those alone: attention to them is never
    computed. They are computed with another array, if one is given."""

    def __init__(self, cache: PagedKVCache, other: mx.array | None = None) -> None:
        self._cache, self._other = cache, other
        self.offset = cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._other is not None:
            keys = mx.depends(keys, self._other)
        self._cache.make_mask(keys.shape[2])  # as models do: what is written is not gathered
        self._cache.update_and_fetch(keys, values)
        return keys, values


heads: WeakKeyDictionary[PagePool, ModelHead] = WeakKeyDictionary()
"""The head of each pool whose last layer is a head's."""


def add_head(pool: PagePool, head: ModelHead) -> None:
    """Let the last layer of a pool be a head's."""
    heads[pool] = head


def head_of(pool: PagePool) -> ModelHead | None:
    """The head whose layer is the last one of a pool; None if it is the model's."""
    return heads.get(pool)


def with_head(stock: Any) -> Any:
    """The call of a model's class, behind which the head of the caches reads what was computed."""
    of_tokens = next(iter([*signature(stock).parameters][1:]), "")

    @wraps(stock)
    def call(model: Module, *args: Any, **options: Any) -> Any:
        caches: Any = args[1] if len(args) > 1 else options.get("cache")
        last: Any = caches[-1] if isinstance(caches, list | tuple) and caches else None
        head = head_of(last.pool) if isinstance(last, PagedKVCache) else None
        if head is None:
            return stock(model, *args, **options)
        if len(args) > 1:
            args = (args[0], caches[:-1], *args[2:])
        else:
            options = {**options, "cache": caches[:-1]}
        with head.step(args[0] if args else options.get(of_tokens), last):
            return stock(model, *args, **options)

    return call
