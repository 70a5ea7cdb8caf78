"""Runs a file of Python in a process of its own, which sets itself limits."""

from __future__ import annotations

import asyncio
import signal
import sys
from subprocess import PIPE
from typing import NamedTuple


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
