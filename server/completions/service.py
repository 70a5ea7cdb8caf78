"""The parts of a server that its routes share: among them threads for work whose cost a client
chooses, beside the event loop, which answers all."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import PIPE
from typing import TypeVar

from paged_kv.extras import extra_module
from paged_kv.integrations.grammar import grammars
from paged_kv.integrations.grammar.constraints import CallConstraint, Constraint
from paged_kv.integrations.grammar.grammars import Grammar, one_line
from paged_kv.integrations.grammar.vocabulary import CompiledGrammar
from paged_kv.lru import LRU
from paged_kv.server.completions.model_names import ModelNames
from paged_kv.server.completions.short_hits import ShortHits
from paged_kv.server.engine.generation_thread import GenerationThread
from paged_kv.server.engine.jobs import Job
from paged_kv.server.engine.paged_model_provider import LoadedModel, PagedModelProvider
from paged_kv.server.engine.sampling import model_constraint
from paged_kv.server.engine.server_metrics import ServerMetrics
from paged_kv.server.http.access import (
    Clients,
    Gate,
    KnownHosts,
    Limits,
    read_api_keys,
    read_limits,
)
from paged_kv.server.http.api_errors import APIError, wrong_value
from paged_kv.server.options import ServerOptions

log = logging.getLogger(__name__)

SESSIONS = "/v1/sessions"

Made = TypeVar("Made")

# stdlib-llama's tokenizer takes a fifth of a second for so many; most bodies are shorter.
LONG_BODY_BYTES = 200_000

# Log probabilities of so many tokens take a tenth of a second to write with 20 alternatives each.
LONG_ANSWER_TOKENS = 1000

# Of each kind.
MOST_PROCESSES = 2
_MOST_GRAMMARS = 512
# A new grammar is compiled in a process first, which the system ends in time; llguidance cannot be
# stopped in a thread. What compiles there is compiled again for the model's tokenizer, on a thread.
COMPILE_S = 5
COMPILE_BYTES = 1 << 30

_THREADS = ("read-short", "read-long", "read-images", "compile", "write-short", "write-long")


class WorkerThreads:
    """Two threads read requests and two write answers: one of each for short work, which does not
    wait for the long work of others. Images, which are decoded and maybe fetched, have a thread of
    their own, and so have grammars, which are compiled. Each runs its work in the order of its
    arrival. What must end in time, whatever it does, has a process of `run_python`, and holds a
    semaphore meanwhile."""

    def __init__(self) -> None:
        self.call_processes = asyncio.Semaphore(MOST_PROCESSES)
        self.grammar_processes = asyncio.Semaphore(MOST_PROCESSES)
        self._threads = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"paged-kv-{name}") for name in _THREADS
        }

    async def read(self, work: Callable[[], Made], body_bytes: int) -> Made:
        return await self._run("read-long" if body_bytes > LONG_BODY_BYTES else "read-short", work)

    async def read_images(self, work: Callable[[], Made]) -> Made:
        return await self._run("read-images", work)

    async def compile(self, work: Callable[[], Made]) -> Made:
        return await self._run("compile", work)

    async def write(self, work: Callable[[], Made], tokens: int) -> Made:
        """The result of work for an answer with log probabilities of so many tokens."""
        return await self._run("write-long" if tokens > LONG_ANSWER_TOKENS else "write-short", work)

    async def _run(self, name: str, work: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads[name], work)

    def close(self) -> None:
        for each in self._threads.values():
            each.shutdown(wait=False, cancel_futures=True)


async def run_python(file: str, *arguments: str, question: bytes) -> bytes:
    """What a file writes, which reads `question` from stdin. The process ends with this call,
    however the call ends. Raises TimeoutError or MemoryError: the system ended it at a limit of its
    own; ValueError: it failed, and this was the last line that it wrote to stderr."""
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
    if process.returncode == -signal.SIGALRM:
        raise TimeoutError("it took too long")
    if process.returncode:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        killed = f"signal {-process.returncode} ended it, as for too much memory"
        raise MemoryError(killed) if process.returncode < 0 else ValueError(reason)
    return output


class Service:
    """One server, whose generation thread is not started yet. Its `place` names it among several
    that share an address. Raises ValueError: an option is wrong; OSError: a file of keys cannot be
    read."""

    def __init__(
        self, options: ServerOptions, provider: PagedModelProvider, place: str = ""
    ) -> None:
        default = Limits(options.priorities, options.max_requests_per_key)
        limits = read_limits(read_api_keys(options.api_key), default)
        self.options, self.place = options, place
        self.metrics = ServerMetrics()
        self.thread = GenerationThread(provider, self.metrics)
        self.names = ModelNames(options)
        self.clients = Clients(limits, default)
        self.hosts = KnownHosts(options.host, options.allowed_hosts)
        self.gate, self.workers = Gate(), WorkerThreads()
        self.short_hits = ShortHits()
        # Those that compile within the limits.
        self._valid_grammars: LRU[Grammar, bool] = LRU(_MOST_GRAMMARS)

    @property
    def is_healthy(self) -> bool:
        """Whether the generation thread is alive, and its step does not hang."""
        return self.thread.is_alive and not self.thread.watch.is_hanging

    @property
    def is_ready(self) -> bool:
        """Whether a request that arrived now would be served."""
        return self.is_healthy and self.gate.is_open and self.thread.loaded.done()

    async def loaded(self) -> LoadedModel | None:
        """Wait for the first model to load; returns the loaded model, if there is one. Raises
        APIError 503: the model cannot be loaded, the server is shutting down, or the generation
        thread has died."""
        try:
            await self.gate.while_open(asyncio.wrap_future(self.thread.loaded))
        except APIError:
            raise
        except Exception as error:
            raise APIError(503, f"no model could be loaded: {error}", code="dead") from error
        self.require_healthy()
        return self.thread.provider.loaded

    async def end_session(self, name: str, salt: Hashable) -> int:
        """End a session of prompts with a salt, and free what only these have cached; returns how
        many blocks' worth of tokens that frees. Raises APIError 503, or 404 if there is no such
        session."""
        with self.gate.entered():
            await self.loaded()
            freed = self.thread.end_session(name, salt)
            self.require_healthy()
            # The thread answers also where nobody waits any more.
            return await asyncio.shield(asyncio.wrap_future(freed))

    async def prepare_grammars(self, jobs: Sequence[Job], loaded: LoadedModel | None) -> None:
        """Compile the grammars of a request's jobs for a model; None if it is not loaded yet.
        Raises APIError 400: a grammar does not compile, or not within the limits; or the extra
        `structured` is not installed."""
        requested, workers = jobs[0].constraint, self.workers  # all jobs of a request have the same
        work = partial(model_constraint, requested, loaded and loaded.tokenizer)
        # The grammar of many tools takes long to write.
        has_tools = isinstance(requested, CallConstraint)
        constraint = await workers.compile(work) if has_tools else work()
        compiled = None
        try:
            if constraint is not None:
                await self._require_valid(constraint.grammar)
            if constraint is not None and loaded is not None:
                self.thread.announce(constraint)
                compiled = await workers.compile(partial(_compiled, loaded, constraint))
        except (APIError, ValueError) as error:
            assert constraint is not None, "it was compiled"
            if isinstance(error, ValueError):
                error = wrong_value(f"{constraint.field}: {error}", constraint.field)
            if not constraint.is_optional:
                raise error from None
            log.warning("calls of tools may not fit their schemas: %s", error)
            constraint = None
        for job in jobs:
            job.constraint = requested if loaded is None else constraint
            job.compiled = compiled

    async def _require_valid(self, grammar: Grammar) -> None:
        """Raise ValueError unless a grammar compiles in a process with limits."""
        if self._valid_grammars.use(grammar):
            return
        extra_module("llguidance", "structured")
        limits, question = (str(COMPILE_S), str(COMPILE_BYTES)), json.dumps([*grammar]).encode()
        try:
            async with self.workers.grammar_processes:
                await run_python(grammars.__file__, *limits, question=question)
        except TimeoutError:
            why = f"compiling it takes longer than {COMPILE_S} s: make it smaller"
        except MemoryError:
            why = f"compiling it takes more than {COMPILE_BYTES:,} bytes: make it smaller"
        except ValueError as error:
            why = one_line(str(error))
        else:
            self._valid_grammars[grammar] = True
            return
        raise ValueError(why)

    def require_healthy(self) -> None:
        """Raise APIError 503 if the generation thread has died."""
        if not self.thread.is_alive:
            raise APIError(503, "the generation thread has died", code="dead")


def _compiled(loaded: LoadedModel, constraint: Constraint) -> CompiledGrammar:
    compiled = loaded.grammars.compiled(constraint)
    compiled.require_quick()
    return compiled
