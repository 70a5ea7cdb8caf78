"""Measures the memory that a prompt step takes besides weights and pages.

Activations grow with the tokens of a step. Where a layer's keys and values are gathered or
expanded, they also grow with the context, and where MLX has no fused attention, with both. So the
memory is measured at small sizes, and a sum of these terms is fitted, which gives it at any size.

Only so many of the first layers run as it takes to meet a layer of every kind: layers run one after
the other, and each gives back what the one before it took. Of a model whose weights were loaded
lazily, the others stay on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

# Tokens of a step, and of the context that it makes. The first is not measured: it loads weights,
# compiles kernels and maps slabs.
MEASURED = ((256, 512), (128, 128), (256, 256), (128, 256), (256, 512))
# A term that changes no measurement by more than this share is noise, which large sizes would blow
# up.
NOISE = 0.02


@dataclass(frozen=True)
class WorkingMemory:
    """The bytes of a prompt step: fixed + step * per_token + context * per_context
    + step * context * per_pair.

    Attributes:
        fixed: of any step.
        per_token: of each token of the step.
        per_context: of each token of the context, the step's included.
        per_pair: of each pair of the two.
    """

    fixed: float
    per_token: float
    per_context: float = 0.0
    per_pair: float = 0.0

    def bytes_for(self, step: int, context: int) -> int:
        """The bytes of a step of `step` tokens that ends a context of `context` tokens."""
        of_context = (self.per_context + step * self.per_pair) * context
        return int(self.fixed + step * self.per_token + of_context)


def working_memory(model: Any, make_cache: Callable[[], list[Any]]) -> WorkingMemory:
    """Measure prompt steps of a model, on prompt caches that `make_cache` returns."""
    with _first_layers(model, make_cache()):
        found = [_measured(model, make_cache(), *sizes) for sizes in MEASURED]
    return _fitted(MEASURED[1:], found[1:])


def _measured(model: Any, cache: list[Any], step: int, context: int) -> int:
    """The most bytes that MLX held during the last `step` tokens of a context beyond what it holds
    after them."""
    while context > step:
        _take(model, cache, min(step, context - step))
        context -= step
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    _take(model, cache, step)
    mx.synchronize()
    return max(0, mx.get_peak_memory() - mx.get_active_memory())


def _take(model: Any, cache: list[Any], tokens: int) -> None:
    """Compute the prompt cache of so many more tokens, as mlx-lm does, and no logits."""
    try:
        model(mx.zeros((1, tokens), mx.int32), cache=cache)
        last: list[mx.array] = []
    except _Enough as enough:
        last = [enough.hidden]
    mx.eval([*last, *(each.state for each in cache if not each.empty())])


class _Enough(Exception):
    """Ends a step where the layers that are left bring nothing new."""

    def __init__(self, hidden: mx.array) -> None:
        super().__init__("the first layers are enough")
        self.hidden = hidden


class _End:
    """Stands for the first layer that is not needed, whose attributes models read."""

    def __init__(self, layer: Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        raise _Enough(hidden)


@contextmanager
def _first_layers(model: Any, cache: list[Any]) -> Iterator[None]:
    """Let steps end behind the first layers of every kind, where the model has a list of layers."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or (needed := _needed(layers, cache)) >= len(layers):
        yield
        return
    kept, layers[needed] = layers[needed], _End(layers[needed])
    try:
        yield
    finally:
        layers[needed] = kept


def _needed(layers: Sequence[Module], cache: Sequence[Any]) -> int:
    """How many of the first layers have all kinds of layers among them, and one more, whose keys
    depend on all of the last kind."""
    kinds = [_kind(*pair) for pair in zip_longest(layers, cache[: len(layers)])]
    return max(kinds.index(kind) for kind in kinds) + 2


def _kind(layer: Any, cache: Any) -> Hashable:
    """Equal for layers that take equal memory."""
    flat: Any = tree_flatten(layer.parameters())
    shapes = tuple((name, array.shape, str(array.dtype)) for name, array in flat)
    return type(layer), shapes, type(cache), getattr(cache, "max_size", None)


def _fitted(sizes: Sequence[tuple[int, int]], measured: Sequence[int]) -> WorkingMemory:
    """The terms that explain the measurements; without those that are noise."""
    terms = np.array([[1, step, context, step * context] for step, context in sizes], np.float64)
    for count in (2, 3, 4):
        found, *_ = np.linalg.lstsq(terms[:, :count], np.array(measured, np.float64), rcond=None)
        missed = np.abs(terms[:, :count] @ found - measured).max()
        if missed <= NOISE * max(measured):
            break
    return WorkingMemory(*(max(0.0, float(each)) for each in found))
