"""Notes the hidden states that a model computes on the way to its output.

Python looks `__call__` up in a class, so that of the backbone's is replaced there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.integrations.model_hooks import SharedChanges, Undo


class _Thread(threading.local):
    """Whose hidden states this thread wants, and the latest."""

    backbone: Module | None = None
    hidden: mx.array | None = None


_this_thread = _Thread()
_hooked = SharedChanges()


def hook_backbone(kind: Any) -> Undo:
    """Let calls of a class note what they return, until what is returned was called for each time
    that it was replaced."""
    return _hooked.hold(kind, partial(_hook, kind))


def _hook(kind: Any) -> Undo:
    own = vars(kind).get("__call__")
    stock = kind.__call__

    @wraps(stock)
    def call(backbone: Module, *args: Any, **options: Any) -> Any:
        found = stock(backbone, *args, **options)
        if _this_thread.backbone is backbone:
            _this_thread.hidden = found
        return found

    kind.__call__ = call
    return partial(_unhook, kind, call, own)


def _unhook(kind: Any, call: Any, own: Any) -> None:
    """Put back a class's own call, unless somebody has replaced ours."""
    if vars(kind).get("__call__") is not call:
        return
    if own is None:
        del kind.__call__
    else:
        kind.__call__ = own


@contextmanager
def hidden_states(backbone: Module) -> Iterator[list[mx.array]]:
    """A list to which the hidden states of this backbone's latest call are put at the end."""
    found: list[mx.array] = []
    outer, _this_thread.backbone, _this_thread.hidden = _this_thread.backbone, backbone, None
    try:
        yield found
        if isinstance(_this_thread.hidden, mx.array):
            found.append(_this_thread.hidden)
    finally:
        _this_thread.backbone, _this_thread.hidden = outer, None
