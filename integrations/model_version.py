"""Tells when a model's weights were exchanged, so that nothing computed before is used after."""

from __future__ import annotations

import weakref
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten


class ModelVersion:
    """Counts how often any parameter of a model became another array: weights that were loaded,
    adapters that were added, taken off or fused, a new dtype.

    MLX replaces arrays and does not change them, so comparing identities is exact.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._count = 0
        self._seen = _references(self._parameters())

    @property
    def count(self) -> int:
        """How many versions were seen before this one. O(parameters)."""
        now = self._parameters()
        same = now.keys() == self._seen.keys() and all(
            self._seen[name]() is array for name, array in now.items()
        )
        if not same:
            self._seen = _references(now)
            self._count += 1
        return self._count

    def _parameters(self) -> dict[str, mx.array]:
        parameters: Any = self._model.parameters()  # type: ignore[no-untyped-call]
        return dict(cast("list[tuple[str, mx.array]]", tree_flatten(parameters)))


def _references(parameters: dict[str, mx.array]) -> dict[str, weakref.ref[mx.array]]:
    return {name: weakref.ref(array) for name, array in parameters.items()}
