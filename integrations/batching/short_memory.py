"""Repeats steps that MLX had no memory for.

Where an allocation fails, MLX's GPU allocators raise an error, in a model's call or where its
results are computed. Such a step is undone here, and all that is cached is evicted. Then the step
is computed in smaller parts: half as many tokens, down to one, or one sequence after the other.

MLX's CPU allocator raises nothing: there the system ends the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from paged_kv.allocator.errors import OutOfMemory, PagedKVError
from paged_kv.integrations.batching.cache_rows import compute as compute_caches
from paged_kv.integrations.batching.cache_rows import joined, put_back, selected
from paged_kv.pool.page_pool import open_pools

logger = logging.getLogger("paged_kv")

# What the errors of MLX's allocators say: Metal's, which also bounds the size and the number of
# buffers, CUDA's, and Metal's where a kernel runs.
_SHORTAGES = (
    "Unable to allocate",
    "greater than the maximum allowed buffer size",
    "Resource limit",
    "out of memory",
    "Insufficient Memory",
)

Undo = Callable[[], None]
T = TypeVar("T")


def is_shortage(error: BaseException) -> bool:
    """Whether MLX or Python raised this error because there is no memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _SHORTAGES)


class _Thread(threading.local):
    """What this thread computes.

    Attributes:
        undo: undoes the latest call of a model, whose results may not be computed yet; empty if
            there is none, None where nobody asks.
        apart: where sequences of a batch are computed one after the other, the rows for which there
            was no memory, and what the errors said.
    """

    undo: list[Undo] | None = None
    apart: dict[int, str] | None = None


this_thread = _Thread()
"""A model's call reads it, and calls no function for it."""


def compute_fitting(compute: Callable[[int], None], size: int, least: int = 1) -> int:
    """Compute the next tokens, as many as MLX has memory for; returns how many.

    Args:
        compute: computes so many next tokens, by one call of a model, and the call's results.
        size: how many tokens to try first; then half as many, and so on.
        least: the fewest tokens of a step, unless fewer are left.

    Raises:
        OutOfMemory: there is no memory for so many; nothing was changed.
    """
    first, has_room = size, False
    while isinstance(shortage := attempted(partial(compute, size)), Shortage):
        if size <= least and has_room:
            raise OutOfMemory(shortage.why)
        make_room()
        size, has_room = max((size + 1) // 2, min(least, size)), True
    if size < first:
        logger.warning("MLX had no memory for a step of %d tokens: %d are computed", first, size)
    return size


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
        """Compute the next step, of at most `left` tokens; returns how many. See
        `compute_fitting`."""
        asked = min(self.size, left)
        count = compute_fitting(compute, asked, self._least)
        if count < asked:
            self.size = count
        return count


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
        if not is_shortage(error) or _has_ranks():
            raise
        for undo in this_thread.undo:
            undo()
        return Shortage(str(error) or type(error).__name__)
    finally:
        this_thread.undo = outer


def _has_ranks() -> bool:
    """Whether other processes compute a model with this one. They do not meet with the same
    shortages, so none of them can repeat a step alone."""
    return any(pool.ranks.size > 1 for pool in open_pools.items())


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
    found: list[mx.array | None] = []
    kept: list[Any] = []
    for row in range(tokens.shape[0]):
        one = taken_out(caches, [row])
        logits: list[mx.array] = []
        try:
            compute_fitting(partial(_compute_row, model, tokens[row : row + 1], one, logits), 1)
        except OutOfMemory as error:
            failed[row] = error.why
        found.append(None if row in failed else logits[-1])
        kept = joined(kept, one)
    some = next((each for each in found if each is not None), None)
    if some is None:
        raise MemoryError(failed[0])
    put_back(caches, kept)
    return mx.concatenate([mx.zeros_like(some) if each is None else each for each in found])


def _compute_row(
    model: Any, tokens: mx.array, cache: list[Any], logits: list[mx.array], _: int
) -> None:
    """Compute a call of one sequence, and put its logits into a list."""
    found = model(tokens, cache=cache)
    mx.eval(found)
    compute_caches(cache)
    logits.append(found)
