"""Detects changes of a model's weights, so that prefixes computed before are not reused."""

from __future__ import annotations

import weakref
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

# Parameters of up to so many bytes are kept, to be compared with their replacements.
SMALL = 1 << 20


class ModelVersion:
    """Counts the changes of a model's parameters: loaded weights, adapters that were added, removed
    or fused, a new dtype.

    MLX replaces arrays and never changes them, so the same array has the same content. Some models
    replace a small array by an equal one whenever they run; small arrays are compared by content.

    Attributes:
        model: the model.
    """

    def __init__(self, model: Module) -> None:
        self.model = model
        self._count = 0
        self._seen = _seen(self._parameters())

    @property
    def count(self) -> int:
        """How many versions were seen before this one. O(parameters)."""
        now = self._parameters()
        if now.keys() != self._seen.keys() or not all(
            _is_same(self._seen[name], array) for name, array in now.items()
        ):
            self._count += 1
            self._seen = _seen(now)
        return self._count

    def _parameters(self) -> dict[str, mx.array]:
        parameters: Any = self.model.parameters()  # type: ignore[no-untyped-call]
        return dict(cast("list[tuple[str, mx.array]]", tree_flatten(parameters)))


Seen = mx.array | weakref.ref[mx.array]


def _seen(parameters: dict[str, mx.array]) -> dict[str, Seen]:
    return {
        name: array if array.nbytes <= SMALL else weakref.ref(array)
        for name, array in parameters.items()
    }


def _is_same(seen: Seen, array: mx.array) -> bool:
    if isinstance(seen, weakref.ref):
        return seen() is array
    return seen is array or (seen.dtype == array.dtype and bool(mx.array_equal(seen, array)))
