"""Lets the calls of a model with paged caches do what MLX's own do not.

mlx-lm calls a model as `model(tokens, cache=prompt_cache)`. A call takes a recorded step where
there is one, computes sequences one after the other if the model takes no more, and counts the
tokens that recurrent states take in. One that fails has no effect: no layer is a step ahead of
another.

Python looks `__call__` up in the model's class, so it is replaced there. Calls with other caches
are those of the class itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial, wraps
from inspect import signature
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from paged_kv.allocator.errors import NotReproducible
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.prompt_caches import frozen, is_list, leaves
from paged_kv.integrations.batching.short_memory import one_after_another, this_thread
from paged_kv.integrations.compiled.recordings import Recordings
from paged_kv.integrations.fixed_steps import fixed_steps
from paged_kv.integrations.heads.model_head import heads, with_head
from paged_kv.integrations.model_hooks import SharedChanges, Undo, replace_call
from paged_kv.integrations.model_version import ModelVersion
from paged_kv.integrations.states.counted_states import CountedArraysCache
from paged_kv.integrations.states.one_by_one import (
    SeparateCaches,
    one_by_one,
    rows_of,
    takes_one_at_a_time,
    widen,
)
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps import read
from paged_kv.steps.sequence import BatchStates, PromptStates
from paged_kv.steps.step import step_numbers

# Steps of few tokens make small arrays, and decode has no time to copy.
MOST_KEPT = 16

_recordings: weakref.WeakKeyDictionary[PagePool, Recordings] = weakref.WeakKeyDictionary()
_hooked = SharedChanges()
_PAGED = {PagedKVCache}


def compile_steps(version: ModelVersion, pool: PagePool, *, on_trial: bool) -> Recordings:
    """Let the calls of a model with caches of this pool take recorded steps; see `Recordings`."""
    head = heads.get(pool)
    recordings = Recordings(version.model, lambda: version.latest, head, on_trial=on_trial)
    _recordings[pool] = recordings
    return recordings


def hook_calls(kind: Any) -> Undo:
    """Replace a class's call, until what is returned was called for each time that it was
    replaced."""
    return _hooked.hold(kind, lambda: replace_call(kind, _call_of(kind)))


class _Caches:
    """What a call of a model changes: the caches of a factory among those that it is given, and the
    others beside them.

    As a context, it undoes a call that fails within: it lets all caches be as they were.

    Attributes:
        given: those that the call is given.
        first: the factory's first.
        pool: of the first, if it has pages.
        known: all of the factory's.
        others: those that have no pages.
        are_separate: whether some are of a model that takes one sequence at a time.
    """

    def __init__(self, given: Any, first: Any, known: Iterable[Any], others: list[Any]) -> None:
        self.given = given
        self.first = first
        self.pool: PagePool | None = first.pool if isinstance(first, PagedKVCache) else None
        self.known = known
        self.are_separate = any(isinstance(each, SeparateCaches) for each in others)
        self.others = others
        # What a cache writes into its arrays lies behind the tokens that it holds.
        self._before = [
            {
                name: value.copy() if type(value) in (list, dict, set) else value
                for name, value in vars(each).items()
            }
            for each in others
        ]
        self._began = 0
        self._was_in_model = False

    @classmethod
    def of(cls, given: Any) -> _Caches | None:
        """Those of a call; None if none of them is a factory's."""
        caches = given if isinstance(given, list | tuple) else ()
        # Not a call for each cache of a model that has no others.
        if set(map(type, caches)) == _PAGED:
            return cls(caches, caches[0], caches, [])
        known = list(_with_inner(caches))
        ours = [each for each in known if isinstance(each, PagedKVCache | CountedArraysCache)]
        if not ours:
            return None
        others = [each for each in known if not isinstance(each, PagedKVCache)]
        return cls(caches, ours[0], known, others)

    def __enter__(self) -> None:
        self._began = next(step_numbers)
        self._was_in_model = read.this_thread.in_model
        read.this_thread.in_model = True

    def __exit__(self, kind: object, *_: object) -> None:
        read.this_thread.in_model = self._was_in_model
        if kind is not None:
            self.undo()

    def undo(self) -> None:
        """Let the caches be as they were before the call."""
        paged = [each for each in self.known if isinstance(each, PagedKVCache)]
        for each in paged:
            step = each.batch.step
            if step is not None and step.number > self._began:
                step.undo()
        for each in paged:
            each.batch = each.batch.narrowed()  # the next call may have another batch size
        for cache, attributes in zip(self.others, self._before, strict=True):
            vars(cache).clear()
            vars(cache).update(attributes)

    def note_step(self, tokens: mx.array | None) -> None:
        """Note what recurrent layers took in, and remember their states. Models with images may get
        embeddings and no tokens."""
        if isinstance(self.first, CountedArraysCache) and tokens is not None:
            self.first.note_step(*tokens.shape)
        if not self.others or tokens is None or tokens.shape[-1] == 1:
            return
        if tokens.shape[-1] > MOST_KEPT:
            # States are parts of arrays with all tokens of the step, which they would keep: MLX
            # copies only what is a small part.
            for cache in self.others:
                if isinstance(cache, ArraysCache):
                    cache.cache = [
                        mx.contiguous(state) if isinstance(state, mx.array) else state
                        for state in cache.cache
                    ]
        _remember_states(self.first, self.given)


def _call_of(kind: Any) -> Any:
    """What takes the place of a class's call."""
    own = kind.__call__
    headed = with_head(own)
    of_tokens = next(iter([*signature(own).parameters][1:]), "")
    is_separate = takes_one_at_a_time(kind)

    @wraps(own)
    def call(model: Module, *args: Any, **options: Any) -> Any:
        stock = headed if heads else own  # not a call for each step of all other models
        given: Any = options["cache"] if "cache" in options else (*args, None, None)[1]
        caches = _Caches.of(given)
        if caches is None:
            return stock(model, *args, **options)
        tokens: Any = args[0] if args else options.get(of_tokens)
        if this_thread.apart is not None:
            return one_after_another(model, tokens, given)
        _record_version(caches.first, tokens)
        with caches:
            output, pool = None, caches.pool
            if pool is not None and pool.is_reproducible:
                caches.known = changed = [*caches.known]
                step = _of_tokens(stock, model, args[1:], options)
                output = fixed_steps(step, tokens, given, changed, is_ragged=not is_separate)
            elif pool is not None and (is_separate or pool.rows or caches.are_separate):
                output = _separately(partial(stock, model), args, options, tokens, caches)
            elif pool is not None and len(args) == 1 and options.keys() == {"cache"}:
                taken = _recordings.get(pool)
                if taken is not None and taken.model is model and tokens.shape[1:] == (1,):
                    output = taken.take(kind, partial(own, model), tokens, given)
            if output is None:
                output = stock(model, *args, **options)
        caches.note_step(tokens)
        if this_thread.undo is not None:
            this_thread.undo[:] = [caches.undo]
        return output

    return call


def _of_tokens(stock: Any, model: Module, others: tuple[Any, ...], options: Any) -> Any:
    """A model's call with tokens and caches alone, which can be cut.

    Raises:
        NotReproducible: it has other arguments.
    """
    given = {*options} - {"cache"}
    if len(others) > 1 or given:
        named = ", ".join(sorted(given)) or "positional ones"
        raise NotReproducible(
            f"a call of the model has arguments beside tokens and cache ({named}), and cannot be "
            "computed in fixed steps: leave them out, or make the factory without reproducible"
        )
    return partial(stock, model)


def _separately(
    step: Any, args: tuple[Any, ...], options: dict[str, Any], tokens: Any, caches: _Caches
) -> Any:
    """The output of a step that is computed for one sequence after the other; None for one sequence
    whose caches the model takes as they are."""
    given = caches.given
    if tokens is not None:
        widen(given, tokens.shape[0])
    with rows_of(given) as rows:
        caches.known = [*caches.known, *_with_inner(chain.from_iterable(rows))]
        if len(rows) > 1:
            return one_by_one(step, tokens, given, rows)
        if not caches.are_separate:
            return None
        if "cache" in options:
            return step(*args, **{**options, "cache": rows[0]})
        return step(args[0], rows[0], *args[2:], **options)


def _record_version(first: PagedKVCache | CountedArraysCache, tokens: Any) -> None:
    """Let sequences know which version of the model computes them. Decode has no time to look: what
    is changed between its steps is noticed in the next step of a prompt, or in the first one of
    a sequence that was fetched or taken out of a batch."""
    is_decode = tokens is not None and tokens.shape[-1] == 1
    if isinstance(first, CountedArraysCache):
        if not is_decode or any(not each.num_tokens for each in first.held):
            first.record_version()
    elif first.pool.versions is not None and (not is_decode or first.batch.step is None):
        number = first.pool.versions.number
        for sequence in first.sequences:
            sequence.record_version(number)


def _remember_states(first: PagedKVCache | CountedArraysCache, caches: Iterable[Any]) -> None:
    """Let the sequences remember the states that they have now, until the next step of several
    tokens: a prompt resumes where the states of a cache are known, and not behind its answer."""
    states = [frozen(each) for each in leaves(caches) if not isinstance(each, PagedKVCache)]
    pool, batch = first.pool, BatchStates(states)
    if pool is None or not all(each.remember(batch) for each in list(pool.snapshots)):
        return
    if isinstance(first, CountedArraysCache):
        rows = len(first.held)
        first.held = [
            each._replace(prompt_states=PromptStates(each.num_tokens or 0, batch, row, rows))
            for row, each in enumerate(first.held)
        ]
        return
    for row, sequence in enumerate(first.sequences):
        length, prompt = sequence.length, sequence.prompt_tokens
        if not prompt or length <= prompt:  # Later tokens are drafts.
            sequence.prompt_states = PromptStates(length, batch, row, len(first.sequences))


def _with_inner(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, and those in lists of caches behind their list."""
    for cache in caches:
        yield cache
        if is_list(cache):
            yield from _with_inner(cache.caches)
