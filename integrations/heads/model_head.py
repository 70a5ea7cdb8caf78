"""A model with a prediction head, whose keys and values are one more layer of the model's pages.

The head's layer takes every step that the model's layers take. So batches, trims, forks, prefixes,
preemption and stores treat it as they treat any other layer. What it writes for a token depends on
that token and on the hidden state before it alone: its attention is computed only where it drafts.
To draft, the head's layer takes steps alone, and is trimmed to the other layers again.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.heads.model_parts import ModelParts
from paged_kv.integrations.heads.noted_outputs import hook_outputs, outputs_of
from paged_kv.integrations.heads.prediction_head import PredictionHead
from paged_kv.integrations.model_hooks import Undo, call_all
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.sequence import Sequence

# Of longer steps only the last hidden state is kept: no draft is that long.
_MOST_KEPT = 32


class _Kept(NamedTuple):
    """Hidden states [S, hidden_size] of a sequence's tokens, from the token at `start` on."""

    start: int
    hidden: mx.array


class ModelHead:
    """A head beside its model.

    Args:
        model: the language model.
        head: its head; it is converted to the dtype of the model's embeddings.

    Raises:
        ValueError: the model has no place for a head, or the head is of another model.
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
        self._nothing = mx.zeros((1, self.parts.hidden_size), like.dtype)
        self._kept: WeakKeyDictionary[Sequence, _Kept] = WeakKeyDictionary()

    @staticmethod
    def _require_shape(what: str, of_model: int, of_head: int) -> None:
        if of_model != of_head:
            raise ValueError(
                f"the head is for a model with {what} {of_head:,}, and this model has "
                f"{of_model:,}: give the head that was trained for this model"
            )

    def hook(self) -> Undo:
        """Let the modules that the head reads note what they return."""
        return partial(call_all, [hook_outputs(kind) for kind in set(map(type, self.modules))])

    def geometry(self) -> LayerGeometry:
        """Of the keys and values of the head's layer. Symbolic: nothing is computed."""
        shown = _Shown()
        like = mx.broadcast_to(self._nothing, (1, 1, self.parts.hidden_size))
        self.head(like, like, shown)
        assert shown.geometry is not None, "a head has a layer with keys and values"
        return shown.geometry

    def read(self, tokens: mx.array | None, outputs: list[mx.array], cache: PagedKVCache) -> None:
        """Take a step that the model's layers have taken.

        Args:
            tokens: [B, S]; None if the model was given embeddings alone.
            outputs: of `modules`, for these.
            cache: of the head's layer.
        """
        hidden = self.head.joined(outputs)
        embeddings = mx.zeros_like(hidden) if tokens is None else self.parts.embed(tokens)
        before, layer = self._before(cache.sequences, len(hidden)), cache.layer
        left = [sequence.progress(layer).padding.left for sequence in cache.sequences]
        previous = mx.concatenate([before, hidden[:, :-1]], axis=1)
        self.head(embeddings, previous, _Written(cache))
        for row, sequence in enumerate(cache.sequences):
            end, count, _ = sequence.progress(layer)
            first = left[row] if row < len(left) else 0  # a new cache has taken the batch's size
            kept = hidden[row, first : first + count]
            if count > _MOST_KEPT:
                kept = kept[-1:]
            self._kept[sequence] = _Kept(end - len(kept), kept)

    def draft(self, sequences: Rows[Sequence], last: list[int], count: int) -> mx.array:
        """The `count` tokens [B, count] that the head expects after a token behind each sequence.

        Raises:
            PoolExhausted: there are no pages for them; nothing was changed.
        """
        pool = sequences[0].pool
        cache = PagedKVCache(pool, pool.num_layers - 1, sequences)
        lengths = [sequence.progress(cache.layer).tokens for sequence in sequences]
        hidden, token = self._before(sequences, len(sequences)), mx.array(last)
        drafted = []
        try:
            for _ in range(count):
                hidden = self.head(self.parts.embed(token[:, None]), hidden, cache)
                token = self.head.likeliest(hidden, self.parts)[:, 0]
                drafted.append(token)
            found = mx.stack(drafted, axis=1)
            mx.eval(found)
        finally:
            taken = [
                sequence.progress(cache.layer).tokens - length
                for sequence, length in zip(sequences, lengths, strict=True)
            ]
            cache.trim_per_sequence(taken)
        return found

    def _before(self, sequences: Rows[Sequence], rows: int) -> mx.array:
        """The hidden states [B, 1, hidden_size] of the sequences' last tokens; zeros where they are
        not known, as behind a prefix that was found."""
        if len(sequences) != rows:  # a new cache, which takes a batch of any size
            return mx.broadcast_to(self._nothing, (rows, 1, self._nothing.shape[-1]))
        return mx.stack([self._last(sequence) for sequence in sequences])

    def _last(self, sequence: Sequence) -> mx.array:
        kept = self._kept.get(sequence)
        if kept is None:
            return self._nothing
        at = sequence.progress(sequence.pool.num_layers - 1).tokens - 1 - kept.start
        return kept.hidden[at : at + 1] if 0 <= at < len(kept.hidden) else self._nothing


class _Shown:
    """A cache that notes the geometry of what it is given."""

    offset = 0
    geometry: LayerGeometry | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.geometry = LayerGeometry.of(keys, values)
        return keys, values


class _Written:
    """A cache that writes keys and values, and gives back those alone: attention to them is never
    computed."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self.offset = cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._cache.update_and_fetch(keys, values)
        return keys, values


_heads: WeakKeyDictionary[PagePool, ModelHead] = WeakKeyDictionary()


def add_head(pool: PagePool, head: ModelHead) -> None:
    """Let the last layer of a pool be a head's."""
    _heads[pool] = head


def head_of(pool: PagePool) -> ModelHead | None:
    """The head whose layer is the last one of a pool; None if it is the model's."""
    return _heads.get(pool)


def with_head(stock: Any) -> Any:
    """The call of a model's class, behind which the head of the caches reads what was computed."""
    of_tokens = next(iter([*signature(stock).parameters][1:]), "")

    @wraps(stock)
    def call(model: Module, *args: Any, **options: Any) -> Any:
        caches: Any = args[1] if len(args) > 1 else options.get("cache")
        last: Any = caches[-1] if isinstance(caches, list | tuple) and caches else None
        head = head_of(last.pool) if _heads and isinstance(last, PagedKVCache) else None
        if head is None:
            return stock(model, *args, **options)
        if len(args) > 1:
            args = (args[0], caches[:-1], *args[2:])
        else:
            options = {**options, "cache": caches[:-1]}
        with outputs_of(head.modules) as outputs:
            output = stock(model, *args, **options)
        head.read(args[0] if args else options.get(of_tokens), outputs, last)
        return output

    return call
