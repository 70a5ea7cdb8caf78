"""Keeps the recorded steps of a model's pool, and chooses among them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from threading import get_ident
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import leaves
from paged_kv.integrations.compiled.cache_states import others_of
from paged_kv.integrations.compiled.model_contents import ModelContents
from paged_kv.integrations.compiled.recording import ModelCall, Recording, require_no_numbers
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.pool.page_pool import PagePool
from paged_kv.sequences.recorded_step import (
    NotRecordable,
    RecordableLayer,
    RecordableStep,
    recordable_layers,
)
from paged_kv.sequences.step import Step

logger = logging.getLogger("paged_kv")

# A run of one batch size needs one for each reach of its tables, and drops the shorter ones.
MOST_KEPT = 16


class Recordings:
    """The recorded steps of one model and one pool.

    Attributes:
        model: the model.
        count: how many steps were recorded.
        repeated: how many steps repeated a recording.
        reason: why no step is recorded; None if they are.
    """

    def __init__(self, model: Module) -> None:
        self.model = model
        self.count = self.repeated = 0
        self.reason: str | None = None
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        # Whether a single sequence, and whether several, were found to be without numbers.
        self._compared: set[bool] = set()
        self._layers: list[RecordableLayer] | None = None
        self._contents: ModelContents | None = None

    def take(self, call: ModelCall, tokens: mx.array, caches: list[Any]) -> mx.array | None:
        """The logits of a step of one token per sequence; None if Python is to take it.

        Args:
            call: the model's own call.
            tokens: int [B, 1].
            caches: a prompt cache of the pool.

        Raises:
            PoolExhausted: the budget does not hold the step's blocks.
            ThreadConflict: see `PagedKVCache.update_and_fetch`.
        """
        if self.reason is not None:
            return None
        paged = [each for each in leaves(caches) if isinstance(each, PagedKVCache)]
        with paged[0].pool.lock:
            try:
                layers = self._layers_of(paged[0].pool)
                step = _step_of(tokens, paged, layers) if layers else None
            except NotRecordable as error:
                self._give_up(error)
                return None
            if layers is None or step is None:
                return None
            try:
                recordable = RecordableStep.of(step, layers)
                if recordable is None:
                    return None
                return self._take(call, tokens, caches, recordable)
            except BaseException:
                step.undo()
                raise

    def _take(
        self, call: ModelCall, tokens: mx.array, caches: list[Any], recordable: RecordableStep
    ) -> mx.array | None:
        if self._contents is None or self._contents.has_changed():
            self._kept.clear()
            self._contents = ModelContents(self.model)
        states = [each for each in leaves(caches) if not isinstance(each, PagedKVCache)]
        # MLX computes a recording in the stream that it was recorded in.
        place = get_ident(), str(mx.default_stream(mx.default_device()))
        tokens = tokens.astype(mx.int32)  # prompts and samplers have different dtypes
        key = recordable.key, place, str(others_of(states)) if states else None
        recording = self._kept.get(key)
        if recording is None:
            recording = self._record(call, tokens, caches, recordable)
            if recording is None:
                return None
            self._kept[key] = recording
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        self.repeated += 1
        return recording(tokens, caches, recordable)

    def _record(
        self, call: ModelCall, tokens: mx.array, caches: list[Any], step: RecordableStep
    ) -> Recording | None:
        contents = self._contents
        assert contents is not None
        call = contents.restoring(call)
        try:
            is_batch = tokens.shape[0] > 1
            if is_batch not in self._compared:
                require_no_numbers(call, tokens, caches, step)
                self._compared.add(is_batch)
            recording = Recording(call, tokens, caches, step)
            contents.require_equal_replacements()
        except ThreadConflict:
            raise
        except Exception as error:  # models raise anything; a step without recording works
            self._give_up(error)
            return None
        self.count += 1
        return recording

    def _layers_of(self, pool: PagePool) -> list[RecordableLayer] | None:
        """The pool's layers; None before all of them are known."""
        if self._layers is None and all(each.knows_all_layers for each in pool.groups):
            self._layers = recordable_layers(pool)
        return self._layers

    def _give_up(self, error: Exception) -> None:
        known = isinstance(error, NotRecordable)
        self.reason = str(error) if known else f"{type(error).__name__}: {error}"
        self._kept.clear()
        logger.info("%s: decode steps are not compiled: %s", _name(self.model), self.reason)


def _name(model: Module) -> str:
    return type(model).__module__.rpartition(".")[2]


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
        if each.has_dependency:
            raise NotRecordable("it lets keys or values in its cache wait for other arrays")
        if each.batch is not batch:
            return None
    step = batch.begin(layers[0].number, 1)
    if not step.waiting.issuperset(each.number for each in layers):
        return None
    step.begin_in_model()
    return step
