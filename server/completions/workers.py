"""Runs work whose cost a client chooses beside the event loop, which answers all.

Two threads read requests and two write answers: one of each for short work, which does not wait for
the long work of others. Images, which are decoded and maybe fetched, have a thread of their own,
and so have grammars, which are compiled. What must end in time, whatever it does, has a process.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE
from typing import NamedTuple, TypeVar

Made = TypeVar("Made")

# stdlib-llama's tokenizer takes a fifth of a second for so many; most bodies are shorter.
LONG_BODY_BYTES = 200_000

# Log probabilities of so many tokens take a tenth of a second to write with 20 alternatives each.
LONG_ANSWER_TOKENS = 1000

_THREADS = ("read-short", "read-long", "read-images", "compile", "write-short", "write-long")


class WorkerThreads:
    """Each thread runs its work in the order of its arrival."""

    def __init__(self) -> None:
        self._threads = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"paged-kv-{name}") for name in _THREADS
        }

    async def read(self, work: Callable[[], Made], body_bytes: int) -> Made:
        """The result of work for a request whose body has so many bytes."""
        return await self._run("read-long" if body_bytes > LONG_BODY_BYTES else "read-short", work)

    async def read_images(self, work: Callable[[], Made]) -> Made:
        """The result of work for a request with images."""
        return await self._run("read-images", work)

    async def compile(self, work: Callable[[], Made]) -> Made:
        """The result of compiling a grammar."""
        return await self._run("compile", work)

    async def write(self, work: Callable[[], Made], tokens: int) -> Made:
        """The result of work for an answer with log probabilities of so many tokens."""
        return await self._run("write-long" if tokens > LONG_ANSWER_TOKENS else "write-short", work)

    async def _run(self, name: str, work: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads[name], work)

    def close(self) -> None:
        """Cancel work that has not begun."""
        for each in self._threads.values():
            each.shutdown(wait=False, cancel_futures=True)


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: its exit status, negative for the signal that ended it.
        output: what it wrote to stdout.
        reason: the last line that it wrote to stderr.
    """

    status: int
    output: bytes
    reason: str

    @property
    def is_too_slow(self) -> bool:
        """Whether it reached its limit of time."""
        return self.status == -signal.SIGALRM


async def run_python(file: str, *arguments: str, question: bytes) -> Ended:
    """Run a file, which reads `question` from stdin. The process ends with this call, however the
    call ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", file, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        # Signals of a terminal are for the server, which finishes its requests.
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate(question)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return Ended(process.returncode, output, reason)
