"""Records what modules of a model return while the model is called."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.integrations.model_hooks import SharedChanges, Undo, replace_call


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
def outputs_of(modules: Sequence[Module]) -> Iterator[list[mx.array]]:
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


def record_outputs(modules: Sequence[Module], outputs: Sequence[mx.array]) -> None:
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
