"""Plans memory before a model is loaded: what it takes, what fits beside it, what could change.

Weights are counted from their files, pages from the pool of a factory that writes none, states of
recurrent layers from a symbolic step, and prompt steps are measured through a few layers
(integrations/working_memory.py).
"""

from __future__ import annotations

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
from paged_kv.integrations.automatic_budget import PROMPT_STEPS, reserve_of, weight_bytes
from paged_kv.integrations.batching.pool_memory import pool_size
from paged_kv.integrations.batching.unpaged_caches import leaves
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.heads.prediction_head import PredictionHead
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory, measured_step
from paged_kv.integrations.speculation.draft_models import divided_factories
from paged_kv.integrations.working_memory import WorkingMemory
from paged_kv.sizes import counted, format_size


@dataclass(frozen=True)
class Wish:
    """What is to fit.

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
    """What a wish takes of a memory; all in bytes.

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

    wish: Wish
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
        return self.session * self.wish.sessions

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

    def plan(self, wish: Wish) -> MemoryPlan:
        """What this wish takes."""
        step = min(wish.step, wish.context)
        # One model after the other takes a step.
        prompt_step = max(each.bytes_for(step, wish.context) for each in self._steps)
        left = self._memory - self._reserve - self._weights - prompt_step
        sizes, states = self._sizes(max(left, 1), wish)
        groups = [group for size in sizes for group in size.groups]
        pages, windows = (
            sum(each.bytes_for(wish.context) for each in groups if each.is_ring == is_ring)
            for is_ring in (False, True)
        )
        slack = sum(size.slack for size in sizes) if left > 0 else 0
        room = max(0, left - slack)
        return MemoryPlan(
            wish=wish,
            memory=self._memory,
            reserve=self._reserve,
            weights=self._weights,
            prompt_step=prompt_step,
            pages=pages,
            windows=windows,
            states=states,
            room=room,
            slack=slack,
            longest=self._longest(sizes, states, room, wish.sessions),
        )

    def changes(self, plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
        """Changes that make a plan smaller, as options of the command, and what each gives."""
        wish = plan.wish
        for name in ("q8", "q8/q4", "q4"):
            changed = self.plan(replace(wish, page_format=name))
            if changed.session < plan.session:
                yield f"--page-format {name}", changed
        for step in PROMPT_STEPS:
            if step < min(wish.step, wish.context):
                yield f"--prefill-step-size {step}", self.plan(replace(wish, step=step))
        if plan.longest is not None and 0 < plan.longest < wish.context:
            shorter = replace(wish, context=plan.longest)
            yield f"--context {plan.longest}", self.plan(shorter)
        if 0 < plan.most_sessions < wish.sessions:
            fewer = replace(wish, sessions=plan.most_sessions)
            yield f"--sessions {plan.most_sessions}", self.plan(fewer)

    def _sizes(self, budget: int, wish: Wish) -> tuple[list[PoolSize], int]:
        """The sizes of the models' pools, and the bytes of a session's states."""
        try:
            factories = self._factories(budget, wish)
        except PoolExhausted:  # no room for a page: what a session takes is known all the same
            factories = self._factories(self._memory, wish)
        states = sum(map(_state_bytes, self._models, factories))
        sizes = [pool_size(factory.pool) for factory in factories]
        for factory in factories:
            factory.close()
        return sizes, states

    def _factories(self, budget: int, wish: Wish) -> list[PagedCacheFactory]:
        """A factory for each model, whose pool knows its layers.

        Raises:
            PoolExhausted: the budget does not hold a page of every layer.
        """
        options = CacheOptions(
            page_format=wish.page_format,
            max_bytes=budget,
            read_tokens=wish.read_tokens,
            offload=wish.offload,
        )
        factories = divided_factories(self._models, options)
        for factory in factories:
            factory.can_admit(0)
        return factories

    def _longest(
        self, sizes: Sequence[PoolSize], states: int, room: int, sessions: int
    ) -> int | None:
        whole = PoolSize(room, 0, tuple(group for size in sizes for group in size.groups))
        if not whole.groups:
            return None
        tokens = whole.tokens_in(max(0, room // sessions - states))
        return None if tokens == float("inf") else int(tokens)


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


def told(plan: MemoryPlan, change: str, changed: MemoryPlan) -> str:
    """What a change gives, in words."""
    saved = format_size(max(0, plan.needed - changed.needed))
    fits = "fits" if changed.fits else f"{counted(changed.most_sessions, 'session')} would fit"
    return f"{change}: {saved} less, {fits}"
