"""Runs work whose cost a client chooses on threads, and not on the event loop, which answers all.

Two threads read requests and two write answers: one of each for short work, which does not wait for
the long work of others. Images, which are decoded and maybe fetched, have a thread of their own,
and so have grammars, which are compiled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")

# stdlib-llama's tokenizer takes a fifth of a second for so many; most bodies are shorter.
LONG_BODY_BYTES = 200_000

# Log probabilities of so many tokens take a tenth of a second to write with 20 alternatives each.
LONG_ANSWER_TOKENS = 1000


class WorkerThreads:
    """Each thread runs its work in the order of its arrival."""

    def __init__(self) -> None:
        self._short, self._long = _thread("read-short"), _thread("read-long")
        self._images = _thread("read-images")
        self._grammars = _thread("compile")
        self._short_answers, self._long_answers = _thread("write-short"), _thread("write-long")

    async def read(self, work: Callable[[], Made], body_bytes: int) -> Made:
        """The result of work for a request whose body has so many bytes."""
        return await _run(self._long if body_bytes > LONG_BODY_BYTES else self._short, work)

    async def read_images(self, work: Callable[[], Made]) -> Made:
        """The result of work for a request with images."""
        return await _run(self._images, work)

    async def compile(self, work: Callable[[], Made]) -> Made:
        """The result of compiling a grammar."""
        return await _run(self._grammars, work)

    async def write(self, work: Callable[[], Made], tokens: int) -> Made:
        """The result of work for an answer with log probabilities of so many tokens."""
        is_long = tokens > LONG_ANSWER_TOKENS
        return await _run(self._long_answers if is_long else self._short_answers, work)

    def close(self) -> None:
        """Cancel work that has not begun."""
        for each in (
            self._short,
            self._long,
            self._images,
            self._grammars,
            self._short_answers,
            self._long_answers,
        ):
            each.shutdown(wait=False, cancel_futures=True)


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"paged-kv-{name}")


async def _run(thread: ThreadPoolExecutor, work: Callable[[], Made]) -> Made:
    return await asyncio.get_running_loop().run_in_executor(thread, work)
