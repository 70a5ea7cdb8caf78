"""A model with a prediction head, whose keys and values are one more layer of the model's pages.

The head's layer takes every step that the model's layers take. So batches, trims, forks, prefixes,
preemption and stores treat it as they treat any other layer. What it writes for a token depends on
that token and on the hidden state before it alone: its attention is computed only where it drafts.
To draft, the head's layer takes steps alone, and is trimmed to the other layers again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.heads.prediction_head import ModelParts, PredictionHead
from paged_kv.integrations.model_hooks import SharedChanges, Undo, call_all, replace_call
from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.progress import NO_PADDING, Padding
from paged_kv.steps.sequence import Sequence

# Of longer steps only the last hidden state is kept: no draft is that long.
_MOST_KEPT = 32


class _Thread(threading.local):
    """What the modules returned whose outputs this thread wants, by their ids; empty before."""

    found: dict[int, list[mx.array]] | None = None


_this_thread = _Thread()
_hooked = SharedChanges()


def hook_outputs(kind: Any) -> Undo:
    """Let calls of a class record what they return, until what is returned was called for each time
    that it was replaced."""
    return _hooked.hold(kind, partial(_hook, kind))


@contextmanager
def outputs_of(modules: Rows[Module]) -> Iterator[list[mx.array]]:
    """A list that has the latest output of each module, whose class is hooked, at the end; it stays
    empty if they were not called."""
    outputs: list[mx.array] = []
    outer, _this_thread.found = _this_thread.found, {id(each): [] for each in modules}
    try:
        yield outputs
        found = _this_thread.found
        if all(found.values()):
            outputs += [found[id(each)][-1] for each in modules]
    finally:
        _this_thread.found = outer


def record_outputs(modules: Rows[Module], outputs: Rows[mx.array]) -> None:
    """Record what modules would have returned."""
    for module, output in zip(modules, outputs, strict=True):
        _record(module, output)


def _record(module: Module, output: mx.array) -> None:
    found = _this_thread.found
    if found is not None and id(module) in found:
        found[id(module)].append(output)


def _hook(kind: Any) -> Undo:
    stock = kind.__call__

    @wraps(stock)
    def call(module: Module, *args: Any, **options: Any) -> Any:
        output = stock(module, *args, **options)
        _record(module, output)
        return output

    return replace_call(kind, call)


class LatestStates(NamedTuple):
    """Where the model's hidden states behind the latest tokens of a sequence are."""

    states: mx.array  # of all rows of a step, [N, hidden_size]
    first: int  # the number of the sequence's first one there
    # The lengths of the sequence behind which states are known, `end` included
    start: int
    end: int


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
        for what, of_model, of_head in (
            ("hidden states of width", self.parts.hidden_size, head.hidden_size),
            ("a vocabulary of", self.parts.vocab_size, head.vocab_size),
        ):
            if of_model != of_head:
                raise ValueError(
                    f"the head is for a model with {what} {of_head:,}, and this model has "
                    f"{of_model:,}: give the head that was trained for this model"
                )
        head.set_dtype(like.dtype)
        layers = self.parts.backbone.layers
        read = [layers[each] for each in head.layers_read(len(layers))]
        self.modules: list[Module] = read or [self.parts.backbone]
        self._unknown = mx.zeros((1, self.parts.hidden_size), like.dtype)
        shown = _Shown()
        head(self._unknown[None], self._unknown[None], shown)  # symbolic: nothing is computed
        assert shown.geometry is not None, "a head has a layer with keys and values"
        self.geometry = shown.geometry

    def hook(self) -> Undo:
        """Let the modules that the head reads record what they return."""
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
        with outputs_of(self.modules) as outputs:
            yield
        if outputs:
            self._read(tokens, self.head.joined(outputs), cache)

    def draft(self, sequences: Rows[Sequence], last: list[int], count: int) -> mx.array:
        """The `count` tokens [B, count] that the head expects after a token behind each sequence.

        Raises:
            PoolExhausted: there are no pages for them; nothing was changed.
        """
        pool = sequences[0].pool
        cache = PagedKVCache(pool, pool.num_layers - 1, sequences)
        with _alone(cache):
            hidden, token = self._states_behind(sequences), mx.array(last)
            drafted = []
            for _ in range(count):
                hidden = self.head(self.parts.embed(token[:, None]), hidden, cache)
                token = self.head.likeliest(hidden, self.parts)[:, 0]
                drafted.append(token)
            found = mx.stack(drafted, axis=1)
            mx.eval(found)
        return found

    def _read(self, tokens: mx.array | None, hidden: mx.array, cache: PagedKVCache) -> None:
        """Write keys and values of a step that the model has taken: of tokens [B, S], or None, and
        the states behind them, [B, S, hidden_size]."""
        rows = len(hidden)
        paddings = [sequence.progress(cache.layer).padding for sequence in cache.sequences]
        if len(paddings) < rows:  # a new cache takes a batch of any size
            paddings = [NO_PADDING] * rows
            before = mx.broadcast_to(self._unknown, (rows, *self._unknown.shape))
        else:
            before = self._states_behind(cache.sequences)
        states = _behind_each(before, hidden, paddings)
        embeddings = mx.zeros_like(hidden) if tokens is None else self.parts.embed(tokens)
        kept, count = states, hidden.shape[1]
        if count > _MOST_KEPT:  # the states [B, 1, hidden_size] behind each row's last token
            ends = [min(count, padding.left + padding.own(count)) for padding in paddings]
            kept = mx.take_along_axis(states, mx.array(ends)[:, None, None], axis=1)
        # Computed with the keys: else what is kept would hold all of the step until it is read.
        self.head(embeddings, states[:, :-1], _Written(cache, kept))
        flat, is_last = kept.reshape(-1, kept.shape[-1]), kept is not states
        for row, (sequence, padding) in enumerate(zip(cache.sequences, paddings, strict=True)):
            own, end = padding.own(count), _length(sequence)
            start = end if is_last else end - own
            first = row * kept.shape[1] + (0 if is_last else padding.left)
            if own:
                sequence.of_head = LatestStates(flat, first, start, end)

    def _states_behind(self, sequences: Rows[Sequence]) -> mx.array:
        """The hidden states [B, 1, hidden_size] behind the last tokens of sequences; zeros where
        they are not known, as behind a prefix that was found."""
        firsts: dict[int, int] = {}
        arrays: list[mx.array] = []
        numbers = []
        for sequence in sequences:
            latest: LatestStates | None = sequence.of_head
            length = _length(sequence)
            if latest is None or not latest.start <= length <= latest.end:
                latest = LatestStates(self._unknown, 0, length, length)
            if id(latest.states) not in firsts:
                firsts[id(latest.states)] = sum(map(len, arrays))
                arrays.append(latest.states)
            numbers.append(firsts[id(latest.states)] + latest.first + length - latest.start)
        return mx.concatenate(arrays)[mx.array(numbers)][:, None]


def _behind_each(before: mx.array, hidden: mx.array, paddings: list[Padding]) -> mx.array:
    """The hidden states [B, S + 1, hidden_size] before the tokens of a step and behind them, each
    row's first one behind its padding.

    Args:
        before: the states before the step, [B, 1, hidden_size].
        hidden: those behind its tokens, [B, S, hidden_size].
    """
    states = mx.concatenate([before, hidden], axis=1)
    if not any(padding.left for padding in paddings):
        return states
    firsts = mx.array([padding.left for padding in paddings])[:, None]
    is_first = mx.arange(states.shape[1]) == firsts
    return mx.where(is_first[:, :, None], before, states)


def _length(sequence: Sequence) -> int:
    """The tokens that the head's layer holds of a sequence."""
    return sequence.progress(sequence.pool.num_layers - 1).tokens


@contextmanager
def _alone(cache: PagedKVCache) -> Iterator[None]:
    """Let a layer take steps alone, without padding. It ends with as many tokens as it had,
    whatever happens."""
    layer, sequences = cache.layer, cache.sequences
    before = [sequence.progress(layer) for sequence in sequences]
    try:
        for sequence in sequences:
            sequence.prepare(layer, NO_PADDING)
        yield
    finally:
        for sequence, progress in zip(sequences, before, strict=True):
            sequence.trim(layer, sequence.progress(layer).tokens - progress.tokens)
            sequence.layers.set(layer, progress._replace(latest=0))


class _Shown:
    """A cache that records the geometry of what it is given."""

    offset = 0
    geometry: LayerGeometry | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.geometry = LayerGeometry.of(keys, values)
        return keys, values


class _Written:
    """A cache that writes keys and values, and gives back those alone: attention to them is never
    computed. They are computed with another array."""

    def __init__(self, cache: PagedKVCache, other: mx.array) -> None:
        self._cache, self._other = cache, other
        self.offset = cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys = mx.depends(keys, self._other)
        self._cache.make_mask(keys.shape[2])  # as models do: what is written is not gathered
        self._cache.update_and_fetch(keys, values)
        return keys, values


heads: WeakKeyDictionary[PagePool, ModelHead] = WeakKeyDictionary()
"""The head of each pool whose last layer is a head's."""


def with_head(stock: Any) -> Any:
    """The call of a model's class, behind which the head of the caches reads what was computed."""
    of_tokens = next(iter([*signature(stock).parameters][1:]), "")

    @wraps(stock)
    def call(model: Module, *args: Any, **options: Any) -> Any:
        caches: Any = args[1] if len(args) > 1 else options.get("cache")
        last: Any = caches[-1] if isinstance(caches, list | tuple) and caches else None
        head = heads.get(last.pool) if isinstance(last, PagedKVCache) else None
        if head is None:
            return stock(model, *args, **options)
        if len(args) > 1:
            args = (args[0], caches[:-1], *args[2:])
        else:
            options = {**options, "cache": caches[:-1]}
        with head.step(args[0] if args else options.get(of_tokens), last):
            return stock(model, *args, **options)

    return call
