"""Repeats steps that MLX had no memory for.

Where an allocation fails, MLX's GPU allocators raise an error, in a model's call or where its
results are computed. Such a step is undone here, and all that is cached is evicted. Then the step
is computed in smaller parts: half as many tokens, down to one, or one sequence after the other. A
sequence for which there is still no memory leaves its BatchGenerator, which goes on with shorter
steps.

MLX's CPU allocator raises nothing: there the system ends the process.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from paged_kv.allocator.errors import OutOfMemory, PagedKVError
from paged_kv.integrations.batching.prompt_caches import compute as compute_caches
from paged_kv.integrations.batching.prompt_caches import joined, put_back, selected
from paged_kv.kernels.pages.errors import is_shortage
from paged_kv.pool.page_pool import open_pools

logger = logging.getLogger("paged_kv")

# However short memory is for one step, later ones are not shorter than this: another sequence may
# have taken the memory, and steps of few tokens take much longer.
LEAST_LASTING = 256

Undo = Callable[[], None]
Responses = tuple[list[Any], list[Any]]
T = TypeVar("T")


class _Thread(threading.local):
    """What this thread computes.

    Attributes:
        undo: undoes the latest call of a model, whose results may not be computed yet; empty if
            there is none, None where nobody asks.
        apart: where sequences of a batch are computed one after the other, the rows for which there
            was no memory, and what the errors said.
        shortages: of the generator whose step it is, if they are noted.
    """

    undo: list[Undo] | None = None
    apart: dict[int, str] | None = None
    shortages: Shortages | None = None


this_thread = _Thread()
"""A model's call reads it, and calls no function for it."""


class FittingSteps:
    """Steps of a prompt that MLX has memory for. One that was too long makes the next ones shorter.

    Attributes:
        size: the most tokens of a step.

    Args:
        least: the fewest; one that is the last of a prompt may have fewer.
    """

    def __init__(self, size: int, least: int = 1) -> None:
        self.size, self._least = size, least

    def take(self, compute: Callable[[int], None], left: int) -> int:
        """Compute the next step: so many tokens, or half as many, and so on; returns how many.

        Args:
            compute: computes so many next tokens, by one call of a model, and the call's results.
            left: the most tokens.

        Raises:
            OutOfMemory: there is no memory for the fewest; nothing was changed.
        """
        first = size = min(self.size, left)
        has_room = False
        while isinstance(shortage := attempted(partial(compute, size)), Shortage):
            if size <= self._least and has_room:
                raise OutOfMemory(shortage.why)
            make_room()
            size, has_room = max((size + 1) // 2, min(self._least, size)), True
        if size < first:
            logger.warning(
                "MLX had no memory for a step of %d tokens: %d are computed", first, size
            )
            self.size = size
        return size


class Shortage(NamedTuple):
    """There was no memory for some work, as the error `why` says. The error itself would hold the
    frames that hold the work's arrays."""

    why: str


def attempted(work: Callable[[], T]) -> T | Shortage:
    """The result of some work, or a shortage if there is no memory for it. Then the model's latest
    call is undone: what it returned, or what is computed of it, may be what failed."""
    outer, this_thread.undo = this_thread.undo, []
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        # Other processes that compute the model with this one do not meet with the same shortages,
        # so none of them can repeat a step alone.
        has_ranks = any(pool.ranks.size > 1 for pool in open_pools.items())
        if has_ranks or not is_shortage(error):
            raise
        for undo in this_thread.undo:
            undo()
        return Shortage(str(error) or type(error).__name__)
    finally:
        this_thread.undo = outer


def if_short_again(work: Callable[[], T]) -> T:
    """The result of what computes little and changes nothing: if there is no memory for it, it is
    repeated once."""
    result = attempted(work)
    if isinstance(result, Shortage):
        make_room()
        return work()
    return result


def taken_out(caches: list[Any], rows: list[int]) -> list[Any]:
    """The prompt cache of some sequences of a batch, which makes small arrays: see `selected`."""
    return if_short_again(partial(selected, caches, rows))


def make_room() -> None:
    """Evict all that is cached and neither pinned nor in use, and let MLX free its buffers."""
    for pool in open_pools.items():
        # Another thread's pool may be within a step.
        with suppress(PagedKVError, RuntimeError, MemoryError):
            pool.settle()
            pool.clear()
    mx.clear_cache()


@contextmanager
def sequences_apart() -> Iterator[dict[int, str]]:
    """Let models' calls compute the sequences of a batch one after the other. Rows for which there
    is no memory get logits of 0, and are noted in what this yields."""
    outer, this_thread.apart = this_thread.apart, {}
    try:
        yield this_thread.apart
    finally:
        this_thread.apart = outer


def one_after_another(model: Any, tokens: mx.array, caches: list[Any]) -> mx.array:
    """The logits [sequences, tokens, vocabulary] of a call with tokens [sequences, tokens],
    computed for one sequence after the other.

    Raises:
        MemoryError: there is none for any of them; nothing was changed.
    """
    failed, this_thread.apart = this_thread.apart, None
    assert failed is not None
    found: dict[int, mx.array] = {}
    kept: list[Any] = []
    for row in range(tokens.shape[0]):
        one = taken_out(caches, [row])

        def compute(_: int, row: int = row, one: list[Any] = one) -> None:
            logits = model(tokens[row : row + 1], cache=one)
            mx.eval(logits)
            compute_caches(one)
            found[row] = logits

        try:
            FittingSteps(1).take(compute, 1)
        except OutOfMemory as error:
            failed[row] = error.why
        kept = joined(kept, one)
    if not found:
        raise MemoryError(failed[0])
    put_back(caches, kept)
    none = mx.zeros_like(next(iter(found.values())))
    return mx.concatenate([found.get(row, none) for row in range(tokens.shape[0])])


class Shortages:
    """What one BatchGenerator has no memory for. `attach` lets it take its steps here.

    Args:
        generator: BatchGenerator.
        step: takes its step.

    Attributes:
        failed: the errors of sequences that it has removed, by uid. Whoever asks for the next step
            gets them, one in each, unless they were taken from here.
        longest: the most tokens of a prompt in its steps; None for as many as it is set to.
    """

    def __init__(self, generator: BatchGenerator, step: Callable[[], Responses]) -> None:
        self._generator: Any = weakref.proxy(generator)
        self._step = step
        self.failed: dict[int, OutOfMemory] = {}
        self.longest: int | None = None

    def step(self) -> Responses:
        """The generator's step.

        Raises:
            OutOfMemory: there was no memory for a sequence in the step before, which is removed;
                nothing else was changed.
        """
        if self.failed:
            raise self.failed.pop(min(self.failed))
        generator = self._generator
        if self.longest is not None:
            generator.prefill_step_size = min(generator.prefill_step_size, self.longest)
        outer, this_thread.shortages = this_thread.shortages, self
        try:
            prompts, generated = self._step()
        except OutOfMemory as error:
            if error.uid is None:
                raise
            self.note(error.uid, error.why)
            prompts, generated = [], []
        finally:
            this_thread.shortages = outer
        for response in generated:
            if response.uid in self.failed and response.finish_reason is not None:
                # It needed no next token, and its cache does not hold this one.
                del self.failed[response.uid]
                response.all_tokens = response.all_tokens[:-1]
        if self.failed:
            generator.remove(list(self.failed))
            prompts = [each for each in prompts if each.uid not in self.failed]
        return prompts, generated

    def note(self, uid: int, why: str) -> None:
        # A new error: one that was raised holds frames, and so caches.
        self.failed[uid] = OutOfMemory(why, uid)
        logger.warning("%s", self.failed[uid])

    def note_step(self, size: int) -> None:
        """Note that there was memory for so many tokens of a longer step."""
        longest = max(size, LEAST_LASTING)
        self.longest = longest if self.longest is None else min(self.longest, longest)
