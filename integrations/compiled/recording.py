"""Records a decode step of a model with `mx.compile`, and repeats it. Finds what the model consists
of: the arrays that a recording takes as arguments, and all else that its results depend on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.prompt_caches import leaves, replaced
from paged_kv.integrations.heads.model_head import outputs_of
from paged_kv.steps.read import PagedKeys, PagedValues
from paged_kv.steps.recorded import NotRecordable, RecordableStep, RecordedStep

# Have attributes, but none that a model's step is made of.
_NOT_OF_A_MODEL = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial)

Replaced = list[tuple[Any, Any]]
"""What a model replaced while it was traced, and what by."""


class RecordedCache:
    """Takes the place of the `PagedKVCache` of one layer, and answers in arrays.

    Raises:
        NotRecordable: the model asks it for anything that it cannot know while a step is recorded.
    """

    def __init__(self, layer: int, step: RecordedStep) -> None:
        self._layer = layer
        self._step = step

    def __getattr__(self, name: str) -> Any:
        if hasattr(PagedKVCache, name):
            raise NotRecordable(f"it asks its cache for `{name}` in each step")
        raise AttributeError(f"a paged cache has no attribute {name!r}")

    @property
    def offset(self) -> mx.array:
        """The position of the next token, int32 [B], also for one sequence."""
        return self._step.offset_of(self._layer)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """No array that it returns can be computed."""
        if N != 1:
            raise NotRecordable(f"it asks for a mask of {N} tokens in a step of one")
        return self._step.mask(self._layer, return_array=return_array, window_size=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        return self._step.write(self._layer, keys, values)

    def keys_and_values(self) -> tuple[PagedKeys, PagedValues]:
        return self._step.read(self._layer)


ModelCall = Callable[..., mx.array]
"""A model's own call: takes tokens int [B, 1] and `cache`, returns logits [B, 1, vocabulary]."""


class Repeated(NamedTuple):
    """What a repeated recording computes: nothing is noted in the caches before `keep`.

    Attributes:
        logits: [B, 1, vocabulary].
        outputs: of the modules whose outputs are wanted.
        changed: what the step changes in each layer's pages.
        states: the new arrays of caches without pages.
        written: the layers that wrote, in their order.
    """

    logits: mx.array
    outputs: list[mx.array]
    changed: list[mx.array]
    states: list[mx.array]
    written: list[int]

    def keep(self, caches: list[Any], step: RecordableStep) -> mx.array:
        """Note the step in all caches; returns the logits."""
        step.keep(self.changed, self.written)
        if self.states:
            _put(unpaged(caches), iter(self.states))
        return self.logits


class Recording:
    """A recorded step. Calls repeat it.

    The model's arrays are arguments. `mx.compile(inputs=)` would make them so too, but puts other
    Python objects in their places when it traces: whoever holds one could change the model in
    place no more.

    Args:
        trace: the step; it is not kept.
        tokens: int [B, 1].
        contents: of the model.

    Raises:
        NotRecordable: the model asks for more than arrays can tell, or replaces what it consists
            of.
        Exception: whatever the model raises when its cache answers in arrays.
    """

    def __init__(self, trace: StepFunction, tokens: mx.array, contents: ModelContents) -> None:
        self._contents = contents
        self._is_void = False
        waiting = [trace]

        def traced(weights: list[mx.array], *given: mx.array) -> list[mx.array]:
            if not waiting:
                self._is_void = True
                return list(given)
            with contents.with_arrays(weights) as replaced:
                results = waiting.pop()(*given)
            return [*results, are_equal(replaced)]

        self._repeat = mx.compile(traced)
        arrays = _arrays(tokens, trace.caches, trace.step)
        *_, is_unchanged = self._repeat(contents.arrays(), *arrays)
        if not is_unchanged.item():
            raise NotRecordable("it replaces its own arrays or settings in each step")
        self._written = trace.written
        self._num_outputs, self._num_changed = len(trace.modules), trace.num_changed

    def __call__(
        self, tokens: mx.array, caches: list[Any], step: RecordableStep
    ) -> Repeated | None:
        """A step of the same key; None if MLX does not repeat the recording, because compiling was
        switched off, or because an array of the model has another shape or dtype now.

        Raises:
            ThreadConflict: another thread has yet to compute what the step reads.
        """
        arrays = _arrays(tokens, caches, step)
        logits, *others, _ = self._repeat(self._contents.arrays(), *arrays)
        if self._is_void:
            return None
        given = iter(others)
        outputs = list(islice(given, self._num_outputs))
        changed = list(islice(given, self._num_changed))
        return Repeated(logits, outputs, changed, list(given), self._written)


def compiling_is_on() -> bool:
    """Whether `mx.compile` repeats what it has traced: not after `mx.disable_compile()`, or with
    MLX_DISABLE_COMPILE. MLX does not tell, so it is tried out."""
    calls: list[None] = []

    def counted(number: mx.array) -> mx.array:
        calls.append(None)
        return number + 1

    function, number = mx.compile(counted), mx.array(0)
    function(number)
    function(number)
    return len(calls) == 1


def _arrays(tokens: mx.array, caches: list[Any], step: RecordableStep) -> list[mx.array]:
    return [tokens, *step.arrays(), *_arrays_of(unpaged(caches))]


class StepFunction:
    """A model's step as a function of arrays, for MLX to trace.

    Attributes:
        call: the model's own.
        caches: the prompt cache.
        step: the prompt cache's step.
        modules: those of the model whose outputs are wanted too.
        written: the layers that wrote, in their order.
        num_changed: how many of the results, after the logits and the modules' outputs, are the
            step's; the others are new states.
    """

    def __init__(
        self,
        call: ModelCall,
        caches: list[Any],
        step: RecordableStep,
        modules: Sequence[Module] = (),
    ) -> None:
        self.call, self.caches, self.step, self.modules = call, caches, step, modules
        self.written: list[int] = []
        self.num_changed = 0

    def __call__(self, *arrays: mx.array) -> list[mx.array]:
        before = unpaged(self.caches)
        tokens, *others = arrays
        first_state = len(others) - len(_arrays_of(before))
        recorded = RecordedStep(self.step, others[:first_state])
        states = [copy.copy(cache) for cache in before]
        _put(states, iter(others[first_state:]))
        seen = iter(states)

        def stand_in(cache: Any) -> Any:
            is_paged = isinstance(cache, PagedKVCache)
            return RecordedCache(cache.layer, recorded) if is_paged else next(seen)

        stand_ins = [replaced(each, stand_in) for each in self.caches]
        with outputs_of(self.modules) as outputs:
            logits = self.call(tokens, cache=stand_ins)
        if not isinstance(logits, mx.array):
            raise NotRecordable(f"it returns a {type(logits).__name__} and not an array")
        if others_of(states) != others_of(before):
            raise NotRecordable("a cache without pages changes more than its arrays' contents")
        changed = recorded.changed()
        self.written, self.num_changed = recorded.written, len(changed)
        return [logits, *outputs, *changed, *_arrays_of(states)]


def unpaged(caches: list[Any]) -> list[Any]:
    """The caches without pages, such as those of recurrent layers."""
    return [each for each in leaves(caches) if not isinstance(each, PagedKVCache)]


def _arrays_of(caches: Iterable[Any]) -> list[mx.array]:
    """The arrays among the attributes of these caches."""
    return [leaf for leaf in _attributes(caches) if isinstance(leaf, mx.array)]


def others_of(caches: Iterable[Any]) -> list[Any]:
    """The attributes that are no arrays, and the shapes and dtypes of those that are."""
    return [
        (leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf
        for leaf in _attributes(caches)
    ]


def _put(caches: Iterable[Any], arrays: Iterator[mx.array]) -> None:
    """Put the next arrays in the places of those of these caches."""

    def replaced(leaf: Any) -> Any:
        return next(arrays) if isinstance(leaf, mx.array) else leaf

    for cache in caches:
        vars(cache).update(tree_map(replaced, vars(cache)))


def _attributes(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        flat: Any = tree_flatten(vars(cache))
        for _, leaf in flat:
            yield leaf


class ModelContents:
    """The places of a model's arrays. A recording takes the arrays as arguments, so it computes
    with those that were changed in place, and keeps none alive that was replaced."""

    def __init__(self, model: Module) -> None:
        self._containers = containers(model)
        self._places = [
            (container, key)
            for container in self._containers
            for key, value in (
                dict.items(container) if isinstance(container, dict) else enumerate(container)
            )
            if isinstance(value, mx.array)
        ]

    def arrays(self) -> list[mx.array]:
        """The arrays, as they are now.

        Raises:
            LookupError: one was removed since.
        """
        return [container[key] for container, key in self._places]

    @contextmanager
    def with_arrays(self, arrays: Iterable[mx.array]) -> Iterator[Replaced]:
        """Let these arrays stand in the places of the model's own, and put back whatever is
        replaced within; the list tells it afterwards."""
        before = [dict(each) if isinstance(each, dict) else list(each) for each in self._containers]
        replaced: Replaced = []
        try:
            for (container, key), array in zip(self._places, arrays, strict=True):
                container[key] = array
            within = [list(values(each)) for each in self._containers]
            try:
                yield replaced
            finally:
                for was, container in zip(within, self._containers, strict=True):
                    now = list(values(container))
                    if len(was) == len(now):
                        pairs = zip(was, now, strict=True)
                        replaced += [(one, other) for one, other in pairs if one is not other]
                    else:
                        replaced.append((was, now))
        finally:
            for container, contents in zip(self._containers, before, strict=True):
                if isinstance(container, dict):
                    container.clear()
                    dict.update(container, contents)  # a module's own does more
                else:
                    container[:] = contents


def are_equal(replaced: Replaced) -> mx.array:
    """Whether a model replaced things by equal ones only, boolean []: some models replace an array
    by an equal one whenever they run. In a trace it is a part of the graph."""
    found = mx.array(True)
    for one, other in replaced:
        found = found & _is_equal(one, other)
    return found


def containers(model: Module) -> list[Any]:
    """The dictionaries and lists that make up a model, each once: its modules, their attributes,
    and those of objects in them, such as `model.args`."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts = [value] if isinstance(value, dict | list | tuple) else []
        if has_attributes(value):
            parts.append(vars(value))
        for part in parts:
            waiting += values(part)
        found += [part for part in parts if not isinstance(part, tuple)]
    return found


def has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _NOT_OF_A_MODEL)


def values(container: Any) -> Iterable[Any]:
    return dict.values(container) if isinstance(container, dict) else container


def _is_equal(one: Any, other: Any) -> mx.array | bool:
    if isinstance(one, mx.array) and isinstance(other, mx.array):
        return mx.array_equal(one, other) & (one.dtype == other.dtype)
    is_setting = isinstance(one, bool | int | float | str)
    return is_setting and type(one) is type(other) and one == other
