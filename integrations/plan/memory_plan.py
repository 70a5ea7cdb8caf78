"""Plans memory before a model is loaded: what it takes, what fits beside it, what could change.

Weights are counted from their files, pages from the pool of a factory that writes none, states of
recurrent layers from a symbolic step, and prompt steps are measured through a few layers
(integrations/working_memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from paged_kv.admission.pool_size import PoolSize
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.prompt_caches import leaves
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.heads.prediction_head import PredictionHead
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory, measured_step
from paged_kv.integrations.speculation.draft_models import divided_factories
from paged_kv.integrations.working_memory import (
    PROMPT_STEPS,
    WorkingMemory,
    reserve_of,
    weight_bytes,
)


@dataclass(frozen=True)
class Workload:
    """What a machine is to hold.

    Attributes:
        context: tokens of a session.
        sessions: how many are held at once.
        page_format: of full pages.
        step: tokens of a prompt step.
        read_tokens: the most that a decode step reads, for which pages hold summaries besides;
            None if it reads all.
        offload: a folder for pages that memory does not hold; None if it holds all.
    """

    context: int
    sessions: int
    page_format: str
    step: int
    read_tokens: int | None = None
    offload: str | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """What a workload takes of a memory; all in bytes.

    Attributes:
        memory: what the machine has.
        reserve: what is left to the system.
        weights: of all models.
        prompt_step: the most that a prompt step takes besides, at the end of a session's context.
        pages: of a session, in layers that see its whole context.
        windows: of a session, in layers with a window.
        states: of a session, in layers without keys and values.
        room: what sessions may take in all.
        slack: what may stay unused of the memory for pages, because slabs hold one format.
        longest: tokens of the longest context of which so many sessions fit; None for no end.
    """

    workload: Workload
    memory: int
    reserve: int
    weights: int
    prompt_step: int
    pages: int
    windows: int
    states: int
    room: int
    slack: int
    longest: int | None

    @property
    def session(self) -> int:
        return self.pages + self.windows + self.states

    @property
    def all_sessions(self) -> int:
        return self.session * self.workload.sessions

    @property
    def needed(self) -> int:
        """Of all, the reserve included."""
        sessions = self.all_sessions + self.slack
        return self.weights + self.prompt_step + sessions + self.reserve

    @property
    def fits(self) -> bool:
        return self.all_sessions <= self.room

    @property
    def most_sessions(self) -> int:
        """How many sessions of this context fit."""
        return self.room // max(1, self.session)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        names = ("session", "all_sessions", "needed", "fits", "most_sessions")
        return asdict(self) | {name: getattr(self, name) for name in names}


class Planner:
    """Plans for models, whose steps it measures once.

    Args:
        models: the model, and what drafts for it if anything does, a model or a head. Their weights
            may be lazy.
        memory: bytes of the machine.
    """

    def __init__(self, models: Sequence[Module], memory: int) -> None:
        self._models, self._memory = list(models), memory
        self._reserve = reserve_of(memory)
        self._weights = sum(map(weight_bytes, models))

    @cached_property
    def _steps(self) -> list[WorkingMemory]:
        # The layer of a head takes less than the model's output layer.
        models = [each for each in self._models if not isinstance(each, PredictionHead)]
        return [measured_step(model) for model in models]

    def plan(self, workload: Workload) -> MemoryPlan:
        """What this workload takes."""
        step = min(workload.step, workload.context)
        # One model after the other takes a step.
        prompt_step = max(each.bytes_for(step, workload.context) for each in self._steps)
        left = self._memory - self._reserve - self._weights - prompt_step
        sizes, states = self._sizes(max(left, 1), workload)
        groups = [group for size in sizes for group in size.groups]
        pages, windows = (
            sum(
                each.bytes_for(workload.context)
                for each in groups
                if (each.ring is not None) == is_ring
            )
            for is_ring in (False, True)
        )
        slack = sum(size.slack for size in sizes) if left > 0 else 0
        room = max(0, left - slack)
        return MemoryPlan(
            workload=workload,
            memory=self._memory,
            reserve=self._reserve,
            weights=self._weights,
            prompt_step=prompt_step,
            pages=pages,
            windows=windows,
            states=states,
            room=room,
            slack=slack,
            longest=_longest(sizes, max(0, room // workload.sessions - states)),
        )

    def changes(self, plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
        """Changes that make a plan smaller, as options of the command, and what each gives."""
        workload = plan.workload
        for name in ("q8", "q8/q4", "q4"):
            try:
                changed = self.plan(replace(workload, page_format=name))
            except ValueError:  # codes cannot hold all heads of the models
                break
            if changed.session < plan.session:
                yield f"--page-format {name}", changed
        for step in PROMPT_STEPS:
            if step < min(workload.step, workload.context):
                yield f"--prefill-step-size {step}", self.plan(replace(workload, step=step))
        if plan.longest is not None and 0 < plan.longest < workload.context:
            shorter = replace(workload, context=plan.longest)
            yield f"--context {plan.longest}", self.plan(shorter)
        if 0 < plan.most_sessions < workload.sessions:
            fewer = replace(workload, sessions=plan.most_sessions)
            yield f"--sessions {plan.most_sessions}", self.plan(fewer)

    def _sizes(self, budget: int, workload: Workload) -> tuple[list[PoolSize], int]:
        """The sizes of the models' pools, and the bytes of a session's states.

        Raises:
            PoolExhausted: not even the whole memory holds a page of every layer.
        """
        options = CacheOptions(
            page_format=workload.page_format,
            max_bytes=budget,
            read_tokens=workload.read_tokens,
            offload=workload.offload,
        )
        try:
            factories = divided_factories(self._models, options)
            for factory in factories:
                factory.can_admit(0)  # Its pool knows all layers then.
        except PoolExhausted:  # no room for a page: what a session takes is known all the same
            if budget >= self._memory:
                raise
            return self._sizes(self._memory, workload)
        states = sum(map(_state_bytes, self._models, factories))
        sizes = [factory.pool.size for factory in factories]
        for factory in factories:
            factory.close()
        return sizes, states


def _longest(sizes: Sequence[PoolSize], nbytes: int) -> int | None:
    """The tokens of a session that these bytes hold in all pools; None if it has no end."""
    whole = PoolSize(nbytes, 0, tuple(group for size in sizes for group in size.groups))
    tokens = whole.tokens_in(nbytes) if whole.groups else math.inf
    return None if tokens == math.inf else int(tokens)


def _state_bytes(model: Any, factory: PagedCacheFactory) -> int:
    """Bytes of a sequence's caches that are not paged. Symbolic: nothing is computed."""
    caches = make_prompt_cache(model)
    stock = [*leaves(caches)]
    # A head's cache is behind those of the model.
    ours = [*leaves(factory.make_cache())][: len(stock)]
    paged = [isinstance(each, PagedKVCache) for each in ours]
    if all(paged):
        return 0
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    unpaged = [cache for cache, is_paged in zip(stock, paged, strict=True) if not is_paged]
    return sum(cache.nbytes for cache in unpaged if not cache.empty())
