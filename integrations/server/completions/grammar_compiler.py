"""Compiles the grammars of requests, with a limit of time and memory, while others are served.

A new grammar is compiled in a process first, which the system ends in time; llguidance cannot be
stopped in a thread. What compiles there is compiled again for the model's tokenizer, on a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from subprocess import PIPE
from typing import Any

from paged_kv.extras import extra_module
from paged_kv.integrations.grammar import grammar_check
from paged_kv.integrations.grammar.call_constraints import CallConstraint
from paged_kv.integrations.grammar.compiled_grammar import CompiledGrammar
from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.integrations.grammar.grammars import Grammar, GrammarError, told
from paged_kv.integrations.server.completions.worker_threads import WorkerThreads
from paged_kv.integrations.server.generation.begun_grammars import model_constraint
from paged_kv.integrations.server.generation.jobs import Job
from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel
from paged_kv.integrations.server.http.api_errors import APIError, wrong_value

log = logging.getLogger(__name__)

TIME_LIMIT_S = 5
MOST_BYTES = 1 << 30
MOST_PROCESSES = 2
_MOST_KNOWN = 512


class GrammarCompiler:
    """Compiles the grammars of all requests of a server.

    Args:
        workers: their threads.
        announce: tells other ranks of a grammar that compiles within the limits.
    """

    def __init__(self, workers: WorkerThreads, announce: Callable[[Constraint], None]) -> None:
        self._workers = workers
        self._announce = announce
        self._processes = asyncio.Semaphore(MOST_PROCESSES)
        self._known: OrderedDict[Grammar, None] = OrderedDict()  # grammars that compile

    async def prepare(self, jobs: Sequence[Job], loaded: LoadedModel | None) -> None:
        """Compile the grammars of a request's jobs for a model; None if it is not loaded yet.

        Raises:
            APIError: 400, a grammar does not compile, or not within the limits; or the extra
                `structured` is not installed.
        """
        asked = jobs[0].constraint  # all jobs of a request have the same
        constraint = await self._of_model(asked, loaded)
        compiled = None
        try:
            if constraint is not None:
                await self._require_valid(constraint)
            if constraint is not None and loaded is not None:
                self._announce(constraint)
                compiled = await self._workers.compile(partial(_compiled, loaded, constraint))
        except APIError as error:
            if constraint is None or not constraint.is_optional:
                raise
            log.warning("calls of tools may not fit their schemas: %s", error)
            constraint = None
        for job in jobs:
            job.constraint = asked if loaded is None else constraint
            job.compiled = compiled

    async def _of_model(
        self, asked: Constraint | CallConstraint | None, loaded: LoadedModel | None
    ) -> Constraint | None:
        work = partial(model_constraint, asked, loaded)
        # The grammar of many tools takes long to write.
        return await self._workers.compile(work) if isinstance(asked, CallConstraint) else work()

    async def _require_valid(self, constraint: Constraint) -> None:
        grammar = constraint.grammar
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return
        try:
            extra_module("llguidance", "structured")
            async with self._processes:
                await _check(grammar)
        except ValueError as error:
            raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
        self._known[grammar] = None
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


def _compiled(loaded: LoadedModel, constraint: Constraint) -> CompiledGrammar:
    compiled = loaded.grammars.compiled(constraint)
    try:
        compiled.require_quick()
    except GrammarError as error:
        raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
    return compiled


async def _check(grammar: Grammar) -> None:
    """Raise ValueError unless a grammar compiles in a process with limits."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", grammar_check.__file__, str(TIME_LIMIT_S), str(MOST_BYTES)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        # Signals of a terminal are for the server, which finishes its requests.
        start_new_session=True,
    )
    try:
        question: Any = json.dumps([*grammar])
        _, errors = await process.communicate(question.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == -signal.SIGALRM:
        raise ValueError(f"compiling it takes longer than {TIME_LIMIT_S} s: make it smaller")
    if process.returncode is not None and process.returncode < 0:
        raise ValueError(f"compiling it takes more than {MOST_BYTES:,} bytes: make it smaller")
    if process.returncode:
        raise ValueError(told(errors.decode(errors="replace").strip().rpartition("\n")[2]))
