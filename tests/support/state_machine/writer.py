"""Processes that write a store and are killed: python -m tests.support.state_machine.writer

It reads pickled `Work` and answers each with how the process ended that did it. That is a fork, so
that nothing is imported again; this process itself never computes anything, as threads that
compute do not survive a fork.
"""

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Before mlx, as in the reading process.
from benches.openblas import LIBRARY as LIBRARY

# isort: split
import mlx.core as mx

from paged_kv.store import folder as folder_module
from tests.support.folders import ROOT
from tests.support.state_machine.worlds import World
from tests.support.system_calls import CALLS, SystemCalls


@dataclass(frozen=True)
class Work:
    """Prompts that a process computes and inserts into a store.

    Attributes:
        killed_at: the system call of the store at which it is killed; it may be done before.
    """

    world: World
    folder: Path
    prompts: list[list[int]]
    killed_at: int


class Writer:
    """The process that forks these processes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.state_machine.writer"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def do(self, work: Work) -> None:
        """Wait for a process to finish or to be killed.

        Raises:
            AssertionError: it ended in any other way.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(work, self._process.stdin)
        self._process.stdin.flush()
        ended = pickle.load(self._process.stdout)
        assert ended in (0, -signal.SIGKILL), f"a writer ended with {ended}"

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    while True:
        try:
            work = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        process = os.fork()
        if not process:
            write(work)
        _, status = os.waitpid(process, 0)
        pickle.dump(os.waitstatus_to_exitcode(status), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def write(work: Work) -> None:
    """Until it ends or is killed."""
    code = 1
    try:
        kill = SystemCalls(work.killed_at, lambda: os.kill(os.getpid(), signal.SIGKILL), CALLS)
        vars(folder_module)["os"] = kill
        factory = work.world.new_factory(work.folder)
        for prompt in work.prompts:
            cache, cached = factory.fetch_cache(prompt)
            for start in range(cached, len(prompt), 256):
                mx.eval(work.world.model(mx.array([prompt[start : start + 256]]), cache=cache))
            factory.insert_cache(prompt, cache)
            del cache
        factory.close()
        code = 0
    finally:
        # Never return into the loop of the process that forked this one.
        os._exit(code)


if __name__ == "__main__":
    main()
