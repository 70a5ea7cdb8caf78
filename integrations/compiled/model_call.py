"""Lets a model's calls take recorded steps.

mlx-lm calls a model as `model(tokens, cache=prompt_cache)`. Python looks `__call__` up in the
model's class, so it is replaced there. Calls of other models of the class, and calls with more
tokens or arguments, are those of the class itself.
"""

from __future__ import annotations

import weakref
from functools import partial, wraps
from typing import Any

from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import leaves
from paged_kv.integrations.compiled.recordings import Recordings
from paged_kv.pool.page_pool import PagePool

_recordings: weakref.WeakKeyDictionary[PagePool, Recordings] = weakref.WeakKeyDictionary()
_hooked: set[type[Module]] = set()


def compile_steps(model: Module, pool: PagePool) -> Recordings:
    """Let the calls of a model with caches of this pool take recorded steps."""
    if type(model) not in _hooked:
        _hook(type(model))
    recordings = _recordings[pool] = Recordings(model)
    return recordings


def _hook(kind: Any) -> None:
    stock = kind.__call__

    @wraps(stock)
    def call(model: Module, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and options.keys() == {"cache"} and args[0].shape[1:] == (1,):
            pool = _pool_of(options["cache"])
            recordings = None if pool is None else _recordings.get(pool)
            if recordings is not None and recordings.model is model:
                logits = recordings.take(kind, partial(stock, model), args[0], options["cache"])
                if logits is not None:
                    return logits
        return stock(model, *args, **options)

    kind.__call__ = call
    _hooked.add(kind)


def _pool_of(caches: Any) -> PagePool | None:
    """The pool of the first paged cache; None if there is none."""
    first = caches[0] if caches else None
    if type(first) is not PagedKVCache:
        first = next(
            (each for each in leaves(caches or ()) if isinstance(each, PagedKVCache)), None
        )
    return None if first is None else first.pool
