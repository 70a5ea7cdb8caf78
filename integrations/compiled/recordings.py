"""Decides whether steps are compiled, keeps the recorded ones of a model's pool, chooses among
them, tries the first ones, and compares some of those that are repeated with steps that Python
takes."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.checks import described
from paged_kv.integrations.batching.prompt_caches import leaves
from paged_kv.integrations.compiled.recording import (
    ModelCall,
    ModelContents,
    Recording,
    Repeated,
    StepFunction,
    compiling_is_on,
    others_of,
    unpaged,
)
from paged_kv.integrations.heads.model_head import ModelHead, record_outputs
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.lru import LRU
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.recorded import (
    NotRecordable,
    RecordableLayer,
    RecordableStep,
    recordable_layers,
)
from paged_kv.steps.step import Step

# Steps that a trial takes both ways and times, one way after the other. The first step of each
# recording is not among them: MLX compiles in it.
TRIAL_STEPS = 7
# Beyond this one, comparisons are as far apart as this. A comparison takes a step in Python: one
# for each recording, ten, and then 0.2 % of all steps.
LAST_DOUBLING = 512
# Of the range of a sequence's logits. Another order of sums (the CPU kernels beside plain
# operations, the embedded model, 40 steps) changed them by 1.2e-6, 1.2e-3 and 9.8e-3; deeper models
# sum more.
TOLERANCES = {mx.float32: 2**-13, mx.float16: 2**-6, mx.bfloat16: 2**-4}


class Comparisons:
    """When steps of one kind are compared, and what was found.

    In a model of experts another order of sums may choose another expert once. So a recording is
    wrong only if two comparisons in turn say so.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_doubtful = False

    def is_due(self, *, is_first: bool) -> bool:
        """Whether the next step is compared; `is_first` if it is the first one to repeat its
        recording."""
        self._steps += 1
        steps = self._steps
        doubles = steps < LAST_DOUBLING and steps & (steps - 1) == 0
        return is_first or self._is_doubtful or doubles or steps % LAST_DOUBLING == 0

    def is_wrong(self, are_alike: bool) -> bool:
        """Note a comparison; returns whether it is the second in turn with other logits."""
        was_doubtful, self._is_doubtful = self._is_doubtful, not are_alike
        return was_doubtful and not are_alike


def are_alike(repeated: mx.array, python: mx.array, dtypes: Iterable[mx.Dtype]) -> bool:
    """Whether two logits [B, 1, vocabulary] differ by no more than another order of sums explains,
    in a model that computes in these dtypes."""
    tolerance = max(TOLERANCES.get(each, 0.0) for each in (python.dtype, *dtypes))
    one, other = (each.astype(mx.float32) for each in (repeated, python))
    is_same = (one == other) | (mx.isnan(one) & mx.isnan(other))
    difference = mx.where(is_same, 0, mx.abs(one - other)).max(axis=-1)
    is_finite = mx.isfinite(other)
    highest = mx.where(is_finite, other, -mx.inf).max(axis=-1)
    lowest = mx.where(is_finite, other, mx.inf).min(axis=-1)
    return bool(mx.all(difference <= tolerance * (highest - lowest)))


logger = logging.getLogger("paged_kv")

# A recording serves steps of one batch size and one reach of block tables (`Tables.reach`). A run
# outgrows short reaches, so the recording that was used least recently is dropped first.
MOST_KEPT = 16
# After each change of the model, a step is recorded and some are compared, which takes as long as
# about 25 steps, and a repeated step saves about a third of one. So a model is no longer compiled
# if, beyond the first few changes, its recordings are repeated less than 75 times each.
FREE_CHANGES, LEAST_REPEATED = 8, 75


class _Call(NamedTuple):
    """A call of a model; see `Recordings.take`."""

    entry: type[Module]
    call: ModelCall
    tokens: mx.array
    caches: list[Any]


class Recordings:
    """The recorded steps of one model and one pool.

    Args:
        model: the model.
        version: tells the number of the version that the model had at the latest prompt, see
            `ModelVersion.latest`.
        head: the prediction head of the pool's last layer; None for none. It takes each step in
            Python, behind the model.
        on_trial: whether recordings serve only after `TRIAL_STEPS` steps, whose logits are
            Python's, in which they were right and faster.

    Attributes:
        model: the model.
        count: how many steps were recorded.
        repeated: how many steps repeated a recording.
        compared: how many of these Python took too, for a comparison; their logits are Python's.
        reason: why no step is recorded; None if they are.
    """

    def __init__(
        self,
        model: Module,
        version: Callable[[], int],
        head: ModelHead | None = None,
        *,
        on_trial: bool = False,
    ) -> None:
        self.model = model
        self._version = version
        self._recorded_version = version()
        self._head = head
        self._modules = [] if head is None else head.modules
        self.count = self.repeated = self.compared = 0
        self.reason: str | None = None
        self._kept: LRU[Hashable, Recording] = LRU(MOST_KEPT)
        self._comparisons: defaultdict[Hashable, Comparisons] = defaultdict(Comparisons)
        self._layers: list[RecordableLayer] | None = None
        self._contents: ModelContents | None = None
        self._changes = 0
        self._is_comparing = False
        self._trial: list[float] | None = [] if on_trial else None  # relative times of its steps

    def take(
        self, entry: type[Module], call: ModelCall, tokens: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """The logits of a step of one token per sequence; None if Python is to take it.

        Args:
            entry: the class whose method is called: a subclass may call its parent's.
            call: that method, of the model.
            tokens: int [B, 1].
            caches: a prompt cache of the pool.

        Raises:
            PoolExhausted: the budget does not hold the step's blocks.
            ThreadConflict: see `PagedKVCache.update_and_fetch`.
        """
        if self.reason is not None or self._is_comparing:
            return None
        if self._head is None:
            return self._take_model(_Call(entry, call, tokens, caches))
        with self._head.step(tokens, caches[-1]):
            return self._take_model(_Call(entry, call, tokens, caches[:-1]))

    def _take_model(self, asked: _Call) -> mx.array | None:
        """The step in the model's layers."""
        paged = [each for each in leaves(asked.caches) if isinstance(each, PagedKVCache)]
        with paged[0].pool.lock:
            try:
                layers = self._layers_of(paged[0].pool)
                step = _step_of(asked.tokens, paged, layers) if layers else None
            except NotRecordable as error:
                self._give_up(error)
                return None
            if layers is None or step is None:
                return None
            with step:
                recordable = RecordableStep.of(step, layers)
                return None if recordable is None else self._take(asked, recordable)

    def _take(self, asked: _Call, step: RecordableStep) -> mx.array | None:
        if self._recorded_version != self._version():
            self._reset_for_change()
            if self.reason is not None:
                return None
        if self._trial is not None:
            mx.eval(asked.tokens)  # what is computed before the step is no part of its time
        began = perf_counter()
        if self._contents is None:
            self._contents = ModelContents(self.model)
        states = unpaged(asked.caches)
        # MLX computes a recording in the stream that it was recorded in.
        place = get_ident(), str(mx.default_stream(mx.default_device()))
        tokens = asked.tokens.astype(mx.int32)  # samplers have different dtypes
        key = asked.entry, step.key, place, str(others_of(states)) if states else None
        recording = self._kept.use(key)
        is_first = recording is None
        if recording is None:
            recording = self._record(asked._replace(tokens=tokens), step, self._contents)
            if recording is None:
                return None
            self._kept[key] = recording
        try:
            found = recording(tokens, asked.caches, step)
        except LookupError:  # an array of the model was removed
            found = None
        if found is None:
            self._reset_for_change()
            return None
        self.repeated += 1
        comparisons = self._comparisons[asked.entry, place, tokens.shape]
        if not comparisons.is_due(is_first=is_first) and self._trial is None:
            record_outputs(self._modules, found.outputs)
            return found.keep(asked.caches, step)
        return self._compared(comparisons, found, asked, step, None if is_first else began)

    def _compared(
        self,
        comparisons: Comparisons,
        found: Repeated,
        asked: _Call,
        step: RecordableStep,
        began: float | None,
    ) -> mx.array | None:
        """The logits of a step that Python takes after a recording was repeated without effect: on
        GPUs it has written the step to its pages, where Python's step writes it again. A trial
        times both, the repeated one from when it began."""
        try:
            mx.eval(found)
        except Exception as error:  # a device may refuse to compute it
            self._give_up(error)
            return None
        ended = perf_counter()
        self.compared += 1
        self._is_comparing = True
        try:
            logits = asked.call(asked.tokens, cache=asked.caches)
        finally:
            self._is_comparing = False
        if self._trial is not None and began is not None:
            mx.eval(logits)
            self._trial.append((ended - began) / (perf_counter() - ended))
        dtypes = {each.pages.geometry.k_dtype for each in step.layers}
        if comparisons.is_wrong(are_alike(found.logits, logits, dtypes)):
            self._give_up(NotRecordable("a repeated step had other logits than one by Python"))
        elif self._trial is not None and len(self._trial) >= TRIAL_STEPS:
            time, self._trial = median(self._trial), None
            if time >= 1:
                self._give_up(NotRecordable(f"they took {time:.2f} times as long as Python's"))
        return logits

    def _record(
        self, asked: _Call, step: RecordableStep, contents: ModelContents
    ) -> Recording | None:
        if not compiling_is_on():
            return None
        trace = StepFunction(asked.call, asked.caches, step, self._modules)
        try:
            recording = Recording(trace, asked.tokens, contents)
        except ThreadConflict:
            raise
        except Exception as error:  # models raise anything; a step without recording works
            self._give_up(error)
            return None
        self.count += 1
        return recording

    def reset(self) -> None:
        """Drop all recordings, and record the next steps anew. Call it after a change that makes no
        new version of the model before its next prompt, see `ModelVersion`: of a class or a global
        variable, or in the middle of an answer."""
        self.reason = None
        self._recorded_version = self._version()
        self._kept.clear()
        self._comparisons.clear()
        self._contents = None

    def _reset_for_change(self) -> None:
        self.reset()
        self._changes += 1
        if self._changes > FREE_CHANGES and self.repeated < self._changes * LEAST_REPEATED:
            self._give_up(NotRecordable("its settings change after few steps"))

    def _layers_of(self, pool: PagePool) -> list[RecordableLayer] | None:
        """The pool's layers; None before all of them are known."""
        if self._layers is None and all(each.knows_all_layers for each in pool.groups):
            of_head = -1 if self._head is None else pool.num_layers - 1
            layers = recordable_layers(pool)
            self._layers = [each for each in layers if each.number != of_head]
        return self._layers

    def _give_up(self, error: Exception) -> None:
        known = isinstance(error, NotRecordable)
        self.reason = str(error) if known else f"{type(error).__name__}: {error}"
        self._kept.clear()
        # Whatever was wrong before any step had logits of a recording has done no harm.
        level = logging.WARNING if self.repeated > self.compared else logging.INFO
        name = type(self.model).__module__.rpartition(".")[2]
        logger.log(level, "%s: decode steps are not compiled: %s", name, self.reason)


def _step_of(
    tokens: mx.array, paged: list[PagedKVCache], layers: list[RecordableLayer]
) -> Step | None:
    """The step of one token that these layers of a prompt cache are about to take; None if they do
    not take it together.

    Raises:
        NotRecordable: they are caches that answer in numbers, or that wait for other arrays.
        PoolExhausted: see `Step.begin_in_model`.
    """
    batch = paged[0].batch
    if tokens.shape != (len(batch.sequences), 1):
        return None
    for each in paged:
        if type(each) is not PagedKVCache:
            raise NotRecordable(f"a {type(each).__name__} answers in numbers")
        if each.dependency is not None:
            raise NotRecordable("it lets keys or values in its cache wait for other arrays")
        if each.batch is not batch:
            return None
    step = batch.begin(layers[0].number, 1)
    if not step.waiting.issuperset(each.number for each in layers):
        return None
    step.begin_in_model()
    return step


def compiles(choice: bool | None, backend: Backend) -> bool | None:
    """Whether steps are recorded: by a factory's argument, else by PAGED_KV_COMPILE; None for a
    trial, else, where the backend's may pay.

    Raises:
        TypeError: the argument is neither a bool nor None.
        ValueError: PAGED_KV_COMPILE is neither 0 nor 1.
    """
    if not isinstance(choice, bool | None):
        raise TypeError(f"compile must be True, False or None, got {described(choice)}")
    named = os.environ.get("PAGED_KV_COMPILE")
    if named not in (None, "0", "1"):
        raise ValueError(f"PAGED_KV_COMPILE must be 0 or 1, got {named!r}")
    if choice is not None:
        return choice
    if named is not None:
        return named == "1"
    return None if backend.recorder is not None and backend.recorder.pays else False
