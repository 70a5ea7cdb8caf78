"""Removes sequences that MLX has no memory for from their BatchGenerator, and lets it go on with
shorter steps."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from mlx_lm.generate import BatchGenerator

from paged_kv.allocator.errors import OutOfMemory
from paged_kv.integrations.mlx_lm_internals import next_of, set_next

Responses = tuple[list[Any], list[Any]]

# However short memory is for one step, later ones are not shorter than this: another sequence may
# have taken the memory, and steps of few tokens take much longer.
LEAST_LASTING = 256

logger = logging.getLogger("paged_kv")

_ATTACHED = "paged_kv_shortages"


class _Thread(threading.local):
    """`current`: the shortages of the generator whose step this thread computes."""

    current: Shortages | None = None


_thread = _Thread()


def current_shortages() -> Shortages | None:
    """Those of the generator whose step this thread computes, if any."""
    return _thread.current


class Shortages:
    """What one BatchGenerator has no memory for. It takes its steps here from now on.

    Args:
        generator: BatchGenerator.
        step: takes its step; None for its own.

    Attributes:
        failed: the errors of sequences that it has removed, by uid. Whoever asks for the next step
            gets them, one in each, unless they were taken from here.
        longest: the most tokens of a prompt in its steps; None for as many as it is set to.
    """

    def __init__(self, generator: BatchGenerator, step: Callable[[], Responses] | None) -> None:
        proxy: Any = weakref.proxy(generator)
        self._generator = proxy
        self._step = step or partial(next_of, proxy)
        self.failed: dict[int, OutOfMemory] = {}
        self.longest: int | None = None
        setattr(generator, _ATTACHED, self)
        # Of this generator only, which keeps it if the factory is uninstalled before it ends.
        set_next(generator, self.step)

    @classmethod
    def of(cls, generator: BatchGenerator) -> Shortages | None:
        """Those of a generator, if any are attached."""
        return getattr(generator, _ATTACHED, None)

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
        outer, _thread.current = _thread.current, self
        try:
            prompts, generated = self._step()
        except OutOfMemory as error:
            if error.uid is None:
                raise
            self.note(error.uid, error.why)
            prompts, generated = [], []
        finally:
            _thread.current = outer
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
        """Note that there is no memory for a sequence."""
        # A new error: one that was raised holds frames, and so caches.
        self.failed[uid] = OutOfMemory(why, uid)
        logger.warning("%s", self.failed[uid])

    def note_step(self, size: int) -> None:
        """Note that there was memory for so many tokens of a longer step."""
        longest = max(size, LEAST_LASTING)
        self.longest = longest if self.longest is None else min(self.longest, longest)
