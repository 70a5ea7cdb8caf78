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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import is_list
from paged_kv.integrations.compiled.recordings import Recordings
from paged_kv.integrations.states.counted_states import CountedArraysCache
from paged_kv.integrations.states.one_by_one import one_by_one, rows_of, takes_one, widen
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.step import step_numbers

_recordings: weakref.WeakKeyDictionary[PagePool, Recordings] = weakref.WeakKeyDictionary()
_hooked: set[type[Module]] = set()


def compile_steps(model: Module, pool: PagePool) -> Recordings:
    """Let the calls of a model with caches of this pool take recorded steps."""
    recordings = _recordings[pool] = Recordings(model)
    return recordings


def hook_calls(kind: Any) -> None:
    """Replace a class's call; once."""
    if kind in _hooked:
        return
    stock = kind.__call__
    of_tokens = [*signature(stock).parameters][1]

    @wraps(stock)
    def call(model: Module, *args: Any, **options: Any) -> Any:
        caches: Any = args[1] if len(args) > 1 else options.get("cache")
        known = list(_with_inner(caches)) if isinstance(caches, list | tuple) else []
        first = next((each for each in known if isinstance(each, PagedKVCache)), None)
        counted = known[0] if known and isinstance(known[0], CountedArraysCache) else None
        if first is None and counted is None:
            return stock(model, *args, **options)
        tokens: Any = args[0] if args else options.get(of_tokens)
        is_plain = len(args) == 1 and options.keys() == {"cache"}
        with _undone_if_it_fails(known):
            output = None
            if first is not None and takes_one(model, first.pool):
                output = _one_by_one(partial(stock, model), tokens, caches)
            elif first is not None and is_plain and tokens.shape[1:] == (1,):
                recordings = _recordings.get(first.pool)
                if recordings is not None and recordings.model is model:
                    output = recordings.take(kind, partial(stock, model), tokens, caches)
            if output is None:
                output = stock(model, *args, **options)
        if counted is not None:
            counted.note_step(*tokens.shape)
        return output

    kind.__call__ = call
    _hooked.add(kind)


def _one_by_one(step: Callable[..., mx.array], tokens: mx.array, caches: Any) -> mx.array | None:
    """The logits of a batch whose sequences are computed one after the other; None of one."""
    widen(caches, tokens.shape[0])
    rows = rows_of(caches)
    if len(rows) == 1:
        return None
    with _undone_if_it_fails([each for row in rows for each in _with_inner(row)]):
        return one_by_one(step, tokens, caches, rows)


@contextmanager
def _undone_if_it_fails(known: list[Any]) -> Iterator[None]:
    """Let caches be as they were before a call that fails: its steps in pages are undone, and what
    other caches hold is put back."""
    began = next(step_numbers)
    held = [(each, _copied(vars(each))) for each in known if not isinstance(each, PagedKVCache)]
    try:
        yield
    except BaseException:
        for each in known:
            step = each.batch.step if isinstance(each, PagedKVCache) else None
            if step is not None and step.number > began:
                step.undo()
        for each, attributes in held:
            vars(each).clear()
            vars(each).update(attributes)
        raise


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a cache, with copies of what it changes in place. What it writes into its
    arrays lies behind the tokens that it holds."""
    return {
        name: value.copy() if type(value) in (list, dict, set) else value
        for name, value in attributes.items()
    }


def _with_inner(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, and those in lists of caches behind their list."""
    for cache in caches:
        yield cache
        if is_list(cache):
            yield from _with_inner(cache.caches)
