"""Serves the requests of a trace as `paged-kv server` does, with a model that computes nothing.

The pool, the prefix cache, the scheduler and mlx-lm's BatchGenerator are those that
serve. Time is that of a clock which the steps move on: each takes as long as the tokens of prompts
that it computes, and at least as long as a step of decode. A request generates as many tokens as it
did, and prompts that continue an answer find it cached.

Nobody looks at numbers, so slabs, keys and values are one number each, broadcast to their shapes.
They take no memory, and the pool counts the bytes that they would take. Not replayed are the states
of recurrent layers, pages on disk, drafts and priorities.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tqdm import tqdm

from paged_kv.allocator.prefixes.eviction import BETTER_OF_TWO, EvictionPolicy
from paged_kv.integrations.batching.preemption import attach
from paged_kv.integrations.batching.rows import Request
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.trace import Trace, TracedLayers, TracedRequest

# As in `paged-kv server`: requests that run at once, prompts that are computed at once, and tokens
# of prompts in a step.
PLACES, PROMPTS_AT_ONCE, STEP_TOKENS = 32, 8, 2048


@dataclass
class Outcome:
    """The result of a replay.

    Attributes:
        served: requests that have ended.
        refused: requests that do not fit even alone.
        prompt_tokens, cached_tokens: of prompts, and how many of them were found cached.
        preemptions: how often a request was preempted.
        peak_bytes: the most that the pages of requests took after a step.
        mean_wait_s, longest_wait_s: from the arrival of a request until it began.
        seconds: of the replay's clock.
    """

    served: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    peak_bytes: int = 0
    mean_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    seconds: float = 0.0


def replay(
    trace: Trace,
    max_bytes: int,
    page_format: str,
    eviction_policy: EvictionPolicy = BETTER_OF_TWO,
) -> Outcome:
    """Serve the requests of a trace with a factory that has these arguments.

    Raises:
        PoolExhausted: the budget does not hold a page of every layer.
        ValueError: the page format cannot hold the layers of the trace.
    """
    model = _IdleModel(trace.layers)
    factory = PagedCacheFactory(
        model,
        max_bytes=max_bytes,
        page_format=page_format,
        eviction_policy=eviction_policy,
        backend=_IdleBackend(),
        compile=False,
    )
    with closing(factory):
        return _Replay(trace, model, factory).run()


class _Replay:
    """One run. The clock counts milliseconds."""

    def __init__(self, trace: Trace, model: _IdleModel, factory: PagedCacheFactory) -> None:
        self._trace, self._factory, self._pool = trace, factory, factory.pool
        self._outcome = Outcome()
        self._now = 0.0
        self._arriving = deque(trace.requests)
        self._requests: dict[int, TracedRequest] = {}  # that wait or run, by uid
        self._generator: Any = BatchGenerator(
            model,
            completion_batch_size=PLACES,
            prefill_batch_size=PROMPTS_AT_ONCE,
            prefill_step_size=STEP_TOKENS,
        )
        # No time passes here, so nobody can be owed any.
        factory.decode_share = 0
        self._preemption = attach(self._generator, factory)

    def run(self) -> Outcome:
        """Serve all requests."""
        outcome, total = self._outcome, len(self._arriving)
        with tqdm(total=total, desc="replay", leave=False, disable=None) as bar:
            while self._arriving or self._requests:
                if not self._requests:
                    self._now = max(self._now, self._arriving[0].arrives)
                while self._arriving and self._arriving[0].arrives <= self._now:
                    self._arrive(self._arriving.popleft())
                if self._requests:
                    self._step()
                bar.update(outcome.served + outcome.refused - bar.n)
        outcome.preemptions = self._pool.counts.preemptions
        outcome.mean_wait_s /= max(1, outcome.served)
        outcome.seconds = self._now / 1000
        return outcome

    def _arrive(self, request: TracedRequest) -> None:
        prompt = request.prompt
        if len(prompt) + request.answer_length > self._pool.size.longest:
            self._outcome.refused += 1
            return
        positions = count(len(prompt))
        (uid,) = self._generator.insert_segments(
            segments=[[prompt]],
            max_tokens=[request.answer_length],
            caches=[self._factory.make_cache()],
            samplers=[lambda _: mx.array([request.token(next(positions))], mx.uint32)],
        )
        self._requests[uid] = request
        begun = partial(self._record_begun, request)
        keep = self._factory.insert_cache
        self._preemption.requests[uid] = Request(when_begun=begun, keep=keep)
        self._preemption.begin_later(uid)

    def _record_begun(self, request: TracedRequest, cached: int) -> None:
        outcome, wait_s = self._outcome, (self._now - request.arrives) / 1000
        outcome.prompt_tokens += request.prompt_length
        outcome.cached_tokens += cached
        outcome.mean_wait_s += wait_s
        outcome.longest_wait_s = max(outcome.longest_wait_s, wait_s)

    def _step(self) -> None:
        """Compute a token of every answer, and at most `STEP_TOKENS` of prompts."""
        with self._generator.stats() as work:
            _, sampled = self._generator.next()
        for response in sampled:
            if response.finish_reason is not None:
                del self._requests[response.uid]
                self._outcome.served += 1
        prompt_ms = work.prompt_tokens * self._trace.prompt_ms
        self._now += max(self._trace.decode_ms, prompt_ms)
        active = self._pool.stats().bytes_active
        self._outcome.peak_bytes = max(self._outcome.peak_bytes, active)


class _IdleModel(Module):
    """A model of mlx-lm with the layers of a trace, those that are alike one after the other."""

    def __init__(self, layers: list[TracedLayers]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [layer for layer in layers for _ in range(layer.count)]

    def make_cache(self) -> list[Any]:
        return [
            KVCache()
            if each.window is None
            else RotatingKVCache(each.window + each.sink_tokens, keep=each.sink_tokens)
            for each in self.layers
        ]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits of two tokens, float32 [B, S, 2], all 0, for inputs [B, S]."""
        batch, count = inputs.shape
        for layer, held in zip(self.layers, cache, strict=True):
            mask = create_attention_mask(inputs, held, window_size=layer.window)
            keys, values = (
                _zeros((batch, heads, count, dim), getattr(mx, layer.dtype))
                for heads, dim in ((layer.k_heads, layer.k_dim), (layer.v_heads, layer.v_dim))
            )
            queries, (keys, values) = keys, held.update_and_fetch(keys, values)
            scaled_dot_product_attention(queries, keys, values, cache=held, scale=1.0, mask=mask)
        return _zeros((batch, count, 2), mx.float32)


class _IdleBackend(Backend):
    """Computes nothing."""

    name = "idle"
    writes_in_place = True  # so that no step is computed because of a write

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        return _zeros((pages * page_units, unit_words), mx.uint16)

    def write(self, *_: Any) -> None:
        pass

    def load(self, *_: Any) -> None:
        pass

    def copy(self, *_: Any) -> None:
        pass

    def attend(self, pages: LayerMemory, queries: mx.array, *_: Any, **__: Any) -> mx.array:
        return _zeros((*queries.shape[:3], pages.geometry.v_dim), queries.dtype)


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.broadcast_to(mx.array(0, dtype), shape)
