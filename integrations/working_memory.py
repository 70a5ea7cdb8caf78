"""Measures the memory that a prompt step takes besides weights and pages.

Steps of doubling sizes are measured, as far as they are quick; longer ones take that many times as
much. Where a layer's keys and values are gathered or expanded, a step takes more the longer its
context is: so much more for each token of it as the next step took.

Only so many of the first layers run as it takes to meet two layers of every kind: layers run one
after the other, and each gives back what the one before it took. Only layers with windows keep a
long step's keys and values to its end, so those of the layers left out are added. Of a model whose
weights were loaded lazily, the others stay on disk.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from itertools import zip_longest
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.checks import format_size
from paged_kv.kernels.pages.memory import device_bytes
from paged_kv.kernels.pages.page_format import PAGE_SIZE

logger = logging.getLogger("paged_kv")

# Tokens of the steps measured: as many as two steps take in no more than this. The fewest are few,
# because a CPU without BLAS takes seconds for a thousand; they are a chunk of Mamba 2, as of
# shorter steps, longer ones take more than a multiple.
FEWEST_TOKENS, MOST_TOKENS = 256, 2048
MOST_SECONDS = 0.4
# How far MLX runs ahead of a CPU differs from time to time: the most of so many times, and a tenth
# for other times.
TIMES, MARGIN = 2, 1.1
# More contexts must take so much more of a step, or the difference is noise, which long ones would
# blow up.
NOISE = 0.05


# Tokens of a prompt step: mlx-lm's, and shorter ones where memory is short.
PROMPT_STEPS = (2048, 1024, 512, 256)
# Of what weights leave, the most that a prompt step may take; else it is made shorter.
STEP_SHARE = 0.25
# The context whose end a prompt step may be at: it matters to models that expand keys and values.
LONG_CONTEXT = 32_768
# Of the memory, for the system, other programs, and what Python and MLX take besides arrays.
RESERVED_SHARE = 0.1


class MeasuredStep(NamedTuple):
    """The bytes of a step of `tokens` at the beginning of a context, and of the step behind it."""

    tokens: int
    first: int
    later: int

    def bytes_at(self, context: int) -> float:
        """The bytes at the end of a context of so many tokens, which grow as those measured."""
        grown = max(0, self.later - self.first) * max(0, context / self.tokens - 1)
        return self.first + (grown if self.later > self.first * (1 + NOISE) else 0)


class WorkingMemory(NamedTuple):
    """The steps that were measured, the shortest first."""

    steps: tuple[MeasuredStep, ...]

    def bytes_for(self, step: int, context: int) -> int:
        """The bytes of a step of `step` tokens that ends a context of `context` tokens: those of
        the next longer one measured, or in proportion to the longest."""
        measured = next((each for each in self.steps if each.tokens >= step), self.steps[-1])
        return int(MARGIN * measured.bytes_at(context) * max(1, step / measured.tokens))


def working_memory(model: Any, make_cache: Callable[[], list[Any]]) -> WorkingMemory:
    """Measure prompt steps of a model, on prompt caches that `make_cache` returns."""
    # A step that fills a window takes other memory than shorter ones: the longest measured does,
    # unless the window is longer than steps are.
    to_fill = min([window for each in make_cache() if (window := _window(each))], default=0)
    fewest = to_fill if to_fill <= MOST_TOKENS else 0
    steps: list[MeasuredStep] = []
    tokens, seconds = FEWEST_TOKENS, 0.0
    with _first_layers(model, make_cache()) as call:
        _measured(call, make_cache(), tokens)  # This loads weights, compiles kernels, maps slabs.
        while not steps or tokens <= fewest or (tokens <= MOST_TOKENS and seconds < MOST_SECONDS):
            began = perf_counter()
            pairs = [_measured(call, make_cache(), tokens) for _ in range(TIMES)]
            seconds = (perf_counter() - began) / TIMES
            steps.append(MeasuredStep(tokens, *map(max, zip(*pairs, strict=True))))
            tokens *= 2
    return WorkingMemory(tuple(steps))


def _measured(model: Any, cache: list[Any], step: int) -> tuple[int, int]:
    """What `_peak` measures of the first `step` tokens of a context, and of as many behind them."""
    return _peak(model, cache, step), _peak(model, cache, step)


def _peak(model: Any, cache: list[Any], step: int) -> int:
    """The most bytes that MLX held during the next `step` tokens but one, beyond what it holds
    after one token more: until then states are parts of the step's arrays, which keep all of them.
    That token is the last of the context, so that it begins no page.
    """
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    _take(model, cache, step - 1)
    mx.synchronize()
    peak = mx.get_peak_memory()
    _take(model, cache, 1)
    mx.synchronize()
    return max(0, peak - mx.get_active_memory()) + _unwritten(cache, step - 1)


def _unwritten(cache: Sequence[Any], step: int) -> int:
    """Bytes of keys and values of a step that the layers left out would write when it ends."""
    left_out = [each for each in cache if isinstance(each, PagedKVCache) and each.empty()]
    groups = [each.pool.group_of(each.layer) for each in left_out]
    return sum(
        step * group.size.block_bytes // (PAGE_SIZE * len(group.layers))
        for group in groups
        if group.window and step > group.window.write_chunk
    )


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

    def __call__(self, *given: mx.array, **named: Any) -> mx.array:
        raise _Enough([*given, *named.values()][0])


@contextmanager
def _first_layers(model: Any, cache: list[Any]) -> Iterator[Callable[..., Any]]:
    """Let steps end behind the first layers of every kind, where the model has a list of layers.
    Yields what takes a step: the call of a factory takes one back that raises, so that the context
    would stay empty, and is passed by where steps end early."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or (needed := _needed(layers, cache)) >= len(layers):
        yield model
        return
    kept, layers[needed] = layers[needed], _End(layers[needed])
    try:
        yield partial(unwrap(type(model).__call__), model)
    finally:
        layers[needed] = kept


def _needed(layers: Sequence[Any], cache: Sequence[Any]) -> int:
    """How many of the first layers have two of every kind among them that occurs twice, and one
    more, whose keys depend on the last of them."""
    of_kind: dict[Hashable, list[int]] = defaultdict(list)
    for at, (layer, its_cache) in enumerate(zip_longest(layers, cache[: len(layers)])):
        flat: Any = tree_flatten(layer.parameters())
        shapes = tuple((name, array.shape, str(array.dtype)) for name, array in flat)
        # Layers of a kind take equal memory.
        of_kind[type(layer), shapes, type(its_cache), _window(its_cache)].append(at)
    return max(places[:2][-1] for places in of_kind.values()) + 2


def _window(cache: Any) -> int | None:
    """Tokens of a cache's window, if it has one."""
    if isinstance(cache, PagedKVCache):
        window = cache.pool.group_of(cache.layer).window
        return window.size if window else None
    return getattr(cache, "max_size", None)


def reserve_of(memory: int) -> int:
    """The bytes of a machine's memory that are left to the system."""
    return int(RESERVED_SHARE * memory)


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights, whether or not they were read."""
    flat: Any = tree_flatten(model.parameters())
    return sum({id(array): array.nbytes for _, array in flat}.values())


def automatic_budget(model: Module, measure: Callable[[], WorkingMemory]) -> tuple[int, int]:
    """The bytes that the pages of a model may take, and the tokens of a prompt step for which the
    rest is left. It is what the device has, less a reserve, what MLX holds or will hold of weights,
    and a prompt step, which `measure` measures."""
    memory = device_bytes()
    held = max(mx.get_active_memory(), weight_bytes(model))
    try:
        step = measure()
    except Exception as error:  # models raise anything
        logger.warning("a prompt step cannot be measured, so a fifth is left for it: %r", error)
        fifth = memory // 5
        step = WorkingMemory((MeasuredStep(PROMPT_STEPS[0], fifth, fifth),))
    left = memory - reserve_of(memory) - held
    sizes = {tokens: step.bytes_for(tokens, LONG_CONTEXT) for tokens in PROMPT_STEPS}
    fitting = (tokens for tokens, nbytes in sizes.items() if nbytes <= STEP_SHARE * left)
    tokens = next(fitting, PROMPT_STEPS[-1])
    taken = sizes[tokens]
    max_bytes = max(1, left - taken)
    logger.info(
        "max_bytes is auto: of %s, %s are left to the system, weights take %s, a prompt step of "
        "%s tokens %s; pages may take %s",
        format_size(memory),
        format_size(reserve_of(memory)),
        format_size(held),
        f"{tokens:,}",
        format_size(taken),
        format_size(max_bytes),
    )
    return max_bytes, tokens
