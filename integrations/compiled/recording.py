"""Records a decode step of a model with `mx.compile`, and repeats it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.cache.recorded_cache import RecordedCache
from paged_kv.integrations.batching.unpaged_caches import is_list, leaves
from paged_kv.integrations.compiled import cache_states
from paged_kv.integrations.compiled.exported_graph import NotExportable, exported_graph
from paged_kv.sequences.recorded_step import NotRecordable, RecordableStep, RecordedStep

ModelCall = Callable[..., mx.array]
"""A model's own call: takes tokens int [B, 1] and `cache`, returns logits [B, 1, vocabulary]."""


class Recording:
    """A recorded step. Calls repeat it.

    Args:
        call: the model's own call.
        tokens: int [B, 1].
        caches: the prompt cache.
        step: the prompt cache's step.

    Raises:
        NotRecordable: the model asks for more than arrays can tell.
        Exception: whatever the model raises when its cache answers in arrays.
    """

    def __init__(
        self, call: ModelCall, tokens: mx.array, caches: list[Any], step: RecordableStep
    ) -> None:
        trace = StepFunction(call, caches, step)
        arrays = [tokens, *step.arrays(), *cache_states.arrays_of(_unpaged(caches))]
        waiting = [trace]  # not kept afterwards: it holds the step
        self._repeat = mx.compile(lambda *given: waiting.pop()(*given))
        self._repeat(*arrays)
        self._written = trace.written
        self._num_changed = trace.num_changed

    def __call__(self, tokens: mx.array, caches: list[Any], step: RecordableStep) -> mx.array:
        """The logits of a step of the same key; it is noted in all caches.

        Raises:
            ThreadConflict: another thread has yet to compute what the step reads.
        """
        unpaged = _unpaged(caches)
        arrays = [tokens, *step.arrays(), *cache_states.arrays_of(unpaged)]
        logits, *others = self._repeat(*arrays)
        step.keep(others[: self._num_changed], self._written)
        if unpaged:
            cache_states.put(unpaged, iter(others[self._num_changed :]))
        return logits


def require_no_numbers(
    call: ModelCall, tokens: mx.array, caches: list[Any], step: RecordableStep
) -> None:
    """Trace a model's step twice, with Python numbers that differ by a token, and compare.

    Raises:
        NotRecordable: the graphs differ, so that a recording would hold a number of its step.
        Exception: see `Recording`.
    """
    function = StepFunction(call, caches, step)
    arrays = [tokens, *step.arrays(), *cache_states.arrays_of(_unpaged(caches))]
    functions = [function.earlier_by(count) for count in (0, 1)]
    try:
        one, other = (exported_graph(each, arrays) for each in functions)
        are_equal = one == other
    except NotExportable:
        # A fused operation, or one of a sharded layer: compare what the graphs compute.
        results = [function.visible(mx.compile(each)(*arrays)) for each in functions]
        are_equal = all(map(mx.array_equal, *results))
    if not are_equal:
        raise NotRecordable("its operations depend on how many tokens there are")


class StepFunction:
    """A model's step as a function of arrays, for MLX to trace.

    Attributes:
        written: the layers that wrote, in their order.
        num_changed: how many of the results, after the logits, are the step's; the others are new
            states.
    """

    def __init__(self, call: ModelCall, caches: list[Any], step: RecordableStep) -> None:
        self._call, self._caches, self._step = call, caches, step
        self.written: list[int] = []
        self.num_changed = 0

    def __call__(self, *arrays: mx.array, earlier: int = 0) -> list[mx.array]:
        unpaged = _unpaged(self._caches)
        tokens, *others = arrays
        first_state = len(others) - len(cache_states.arrays_of(unpaged))
        recorded = RecordedStep(self._step, others[:first_state], earlier)
        states = cache_states.copies_with(unpaged, iter(others[first_state:]))
        seen = iter(states)
        stand_ins = [_stand_in(each, recorded, seen) for each in self._caches]
        logits = self._call(tokens, cache=stand_ins)
        if not isinstance(logits, mx.array):
            raise NotRecordable(f"it returns a {type(logits).__name__} and not an array")
        if cache_states.others_of(states) != cache_states.others_of(unpaged):
            raise NotRecordable("a cache without pages changes more than its arrays' contents")
        changed = recorded.changed()
        self.written, self.num_changed = recorded.written, len(changed)
        return [logits, *changed, *cache_states.arrays_of(states)]

    def visible(self, results: list[mx.array]) -> list[mx.array]:
        """Of the function's results, those that the model's user sees: logits and states."""
        return [results[0], *results[1 + self.num_changed :]]

    def earlier_by(self, count: int) -> Callable[..., list[mx.array]]:
        """The function with Python numbers of `count` tokens less, and equal arrays."""
        return lambda *arrays: self(*arrays, earlier=count)


def _unpaged(caches: list[Any]) -> list[Any]:
    return [each for each in leaves(caches) if not isinstance(each, PagedKVCache)]


def _stand_in(cache: Any, recorded: RecordedStep, states: Iterator[Any]) -> Any:
    if is_list(cache):
        return type(cache)(*[_stand_in(inner, recorded, states) for inner in cache.caches])
    if isinstance(cache, PagedKVCache):
        return RecordedCache(cache.layer, recorded)
    return next(states)
