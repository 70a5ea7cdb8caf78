"""Measures the memory that a prompt step takes besides weights and pages.

Activations grow with the tokens of a step. Where a layer's keys and values are gathered or
expanded, they also grow with the context, and where MLX has no fused attention, with both. So the
memory is measured at sizes that are quick, and a sum of these terms is fitted, which gives it at
any size.

Only so many of the first layers run as it takes to meet two layers of every kind: layers run one
after the other, and each gives back what the one before it took. Of a model whose weights were
loaded lazily, the others stay on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

# Tokens of the steps that are measured: as many as take no longer than this.
FEWEST_TOKENS, MOST_TOKENS = 128, 2048
MOST_SECONDS = 0.2
TIMES = 2
# More contexts must take so much more of a step, or the difference is noise, which long ones would
# blow up.
NOISE = 0.05


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
        return max(0, int(self.fixed + step * self.per_token + of_context))


def working_memory(model: Any, make_cache: Callable[[], list[Any]]) -> WorkingMemory:
    """Measure prompt steps of a model, on prompt caches that `make_cache` returns."""

    def measured(step: int, context: int) -> int:
        return _measured(model, make_cache(), step, context)

    with _first_layers(model, make_cache()):
        # This loads weights, compiles kernels and maps slabs.
        measured(FEWEST_TOKENS, 2 * FEWEST_TOKENS)
        tokens = FEWEST_TOKENS
        while tokens < MOST_TOKENS and _seconds(measured, tokens) < MOST_SECONDS:
            tokens *= 2
        half = tokens // 2
        sizes = [(half, half), (half, tokens), (tokens, tokens), (tokens, 2 * tokens)]
        # How far MLX runs ahead of a CPU differs from time to time.
        return _fitted(sizes, [max(measured(*size) for _ in range(TIMES)) for size in sizes])


def _seconds(measured: Callable[[int, int], int], tokens: int) -> float:
    began = perf_counter()
    measured(tokens, tokens)
    return perf_counter() - began


def _measured(model: Any, cache: list[Any], step: int, context: int) -> int:
    """The most bytes that MLX held during the last `step` tokens of a context beyond what it holds
    after one token more: until then states are parts of the step's arrays, which keep all of them.
    """
    while context > step:
        _take(model, cache, min(step, context - step))
        context -= step
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    _take(model, cache, step)
    mx.synchronize()
    peak = mx.get_peak_memory()
    _take(model, cache, 1)
    mx.synchronize()
    return max(0, peak - mx.get_active_memory())


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
    """How many of the first layers have two of every kind among them that occurs twice, and one
    more, whose keys depend on the last of them."""
    kinds = [_kind(*pair) for pair in zip_longest(layers, cache[: len(layers)])]
    of_kind = defaultdict(list)
    for at, kind in enumerate(kinds):
        of_kind[kind].append(at)
    return max(places[:2][-1] for places in of_kind.values()) + 2


def _kind(layer: Any, cache: Any) -> Hashable:
    """Equal for layers that take equal memory."""
    flat: Any = tree_flatten(layer.parameters())
    shapes = tuple((name, array.shape, str(array.dtype)) for name, array in flat)
    return type(layer), shapes, type(cache), getattr(cache, "max_size", None)


def _fitted(sizes: Sequence[tuple[int, int]], measured: Sequence[int]) -> WorkingMemory:
    """The terms that explain the measurements of two steps, at two contexts each."""
    half, half_later, whole, whole_later = measured
    grows = half_later > half * (1 + NOISE) and whole_later > whole * (1 + NOISE)
    terms = np.array([[1, step, context, step * context] for step, context in sizes], np.float64)
    count = 4 if grows else 2
    found, *_ = np.linalg.lstsq(terms[:, :count], np.array(measured, np.float64), rcond=None)
    return WorkingMemory(*map(float, found))
