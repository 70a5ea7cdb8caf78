"""Runs the generation thread: only it touches models, caches and arrays.

Between two steps the thread takes commands from other threads, drops jobs of disconnected clients,
gives new jobs to the batch of their model, and refuses jobs that waited too long. The batch's
scheduler says which jobs begin. Only a job that cannot join the batch, and what comes behind it,
waits here until the batch is empty. An error in one job ends that job; an error in a step ends the
jobs of that step. If the thread dies, `ended` tells.

Where several ranks share the model, each runs this thread on the same commands and the same clock,
rank 0's. So all of them begin, preempt and drop the same jobs, and compute the same steps.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import traceback
from bisect import insort
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import groupby
from time import monotonic

import mlx.core as mx

from paged_kv.allocator.errors import PoolExhausted, UnknownSession
from paged_kv.integrations.distributed.sharded_model import require_same_prefixes
from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.kernels.pages.errors import is_shortage
from paged_kv.server.engine.jobs import Begun, Channel, Empty, Event, Failed, Freed, Job, Token
from paged_kv.server.engine.next_turns import QUIET_S, NextTurn, NextTurns
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.rows import Rows
from paged_kv.server.engine.server_metrics import ServerMetrics, StepWatch
from paged_kv.server.http.api_errors import APIError, busy, no_memory, shortened

log = logging.getLogger(__name__)

# One failed step may be a passing fault. After so many in a row, continuing serves no request.
MOST_FAILED_STEPS = 3

# An idle rank 0 says so now and then, so that the others know that it does not hang.
IDLE_S = 5.0

# Steps after which ranks compare their caches: that takes as long as hashing the cached tokens.
COMPARED_STEPS = 64

# What makes these is the same on all ranks: the request, or that a rank's pool is full.
COMMON_ERRORS = (APIError, PoolExhausted)

Command = Callable[["GenerationThread"], None]


class GenerationThread:
    """Generates for the jobs that are submitted, from `start` to `stop`.

    Only this thread uses the provider, apart from attributes that say otherwise.

    Attributes:
        loaded: done when the first model is loaded, or has failed to load.
        ended: done when the thread has ended; false if it has died.
        jobs: the waiting and running jobs, by number; other threads may read it.
    """

    def __init__(self, provider: PagedModelProvider, metrics: ServerMetrics) -> None:
        self.provider = provider
        self.metrics = metrics
        self.loaded: Future[None] = Future()
        self.ended: Future[bool] = Future()
        self.watch = StepWatch(provider.options.step_timeout)
        self.jobs: dict[int, Job] = {}
        self.next_turns = NextTurns(provider, metrics)
        self._options = provider.options
        self._ranks = provider.ranks
        self._queue: list[Job] = []  # that cannot join the batch yet, in their order
        self._rows: Rows | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._now = monotonic()
        self._used = self._now  # when a request was there last
        self._events: list[tuple[Channel, Event]] = []  # to be sent together
        self._refusal: APIError | None = None
        self._has_left = False  # a job, since the pools last released dropped caches
        self._stopped = False
        self._steps = self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="paged-kv-generate")

    def start(self) -> None:
        """Start the thread: it loads the model and serves."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, so that it will serve submitted jobs."""
        return self._thread.is_alive() and not self.ended.done()

    def described_step(self) -> str:
        """How long the present step has taken, and what it computes."""
        # One that begins in this step still counts as waiting.
        jobs = "; ".join(
            f"{job.request_id}: {job.stage}, {len(job.prompt.tokens) if job.prompt else 0} prompt "
            f"tokens, {job.generated_tokens} generated"
            for job in tuple(self.jobs.values())
        )
        return f"a step hangs: it has taken {self.watch.age_s:.0f} s so far. The requests: {jobs}"

    def submit(self, jobs: Iterable[Job]) -> None:
        self._commands.put(partial(GenerationThread._arrive, jobs=[*jobs]))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Drop jobs that wait or run; jobs that have ended are ignored."""
        for job in jobs:  # a command each: one that fails does not keep the others
            self._commands.put(partial(GenerationThread._drop, number=job.number))

    def cancel_choice(self, job: Job, number: int) -> None:
        self._commands.put(partial(GenerationThread._drop_choice, number=job.number, choice=number))

    def announce(self, constraint: Constraint) -> None:
        """Let the other ranks compile a grammar, while this one does."""
        if self._ranks.size > 1:
            self._commands.put(partial(GenerationThread._compile, constraint=constraint))

    def end_session(self, session: str, salt: Hashable) -> Freed:
        """Evict what only the prompts of a session with a salt use; the future tells how much, or
        raises APIError 404. A job of the session goes on, and what it inserts is the session's
        again."""
        freed = Freed()
        self._commands.put(
            partial(GenerationThread._end_session, session=session, salt=salt, freed=freed)
        )
        return freed

    def prepare_next(self, turn: NextTurn) -> None:
        """Compute what the next turn of a chat begins with, while there are no jobs."""
        self.next_turns.add(turn)
        if self.next_turns.has_work:  # of one rank alone, so no other one gets this command
            self._commands.put(lambda _: None)  # wakes the thread

    def refuse(self, error: APIError) -> None:
        """Answer waiting and later jobs with an error; finish the running ones."""
        self._commands.put(partial(GenerationThread._refuse, error=error))

    def stop(self) -> None:
        """End after the present step. If there is a store, cached prefixes are written to it."""
        self._commands.put(GenerationThread._note_stop)

    def join(self) -> None:
        self._thread.join()

    # All that follows runs on the thread.

    def _run(self) -> None:
        died = True
        try:
            self._serve()
            died = False
        except BaseException as error:
            # `loaded` already reports a failure to load the model.
            if self.loaded.exception() is not error:
                log.exception("the generation thread has died")
        try:
            self._close(died)
        except BaseException:
            died = True
            log.exception("the generation thread could not close its caches")
        self.ended.set_result(not died)
        # Submitters check `ended` from now on: answer the last jobs that did not see it.
        self._obey(self._taken(0.0))
        self._flush()

    def _serve(self) -> None:
        try:
            self.provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's
            self._use_loaded()
        except BaseException as error:
            self.loaded.set_exception(error)
            raise
        self.loaded.set_result(None)
        self._used = self._now = self._ranks.broadcast("clock", monotonic())
        while not self._stopped:
            self._obey(self._next_commands())
            self._begin()
            self._step()
            self._prepare_next()
            self._refuse_late()
            if self._has_left:
                self.provider.release_unused(is_idle=not self.jobs)
                self._has_left = False
            self._unload_unused()
            self._flush()

    def _next_commands(self) -> list[Command]:
        """Rank 0's commands, which all ranks obey at the time of its clock."""
        commands: list[Command] = []
        if self._ranks.rank == 0:
            most = [IDLE_S if self._ranks.size > 1 else threading.TIMEOUT_MAX]
            most.append(self.provider.reuse.next_end - self._now)
            if self._rows is not None and self._options.model_ttl is not None:
                most.append(self._used + self._options.model_ttl - self._now)
            if self._can_prepare:
                most.append(self._used + QUIET_S - self._now)
            # A job whose prompt is fetched is not there yet: its arrival is a command.
            is_idle = not self._queue and not self._rows
            commands = self._taken(max(0.0, min(most)) if is_idle else 0.0)
        self._now, commands = self._ranks.broadcast("commands", (monotonic(), commands))
        self.provider.reuse.advance(self._now)
        return commands

    def _taken(self, wait_s: float) -> list[Command]:
        """The queued commands; if there are none, wait for one at most so many seconds."""
        commands: list[Command] = []
        with suppress(queue.Empty):
            commands.append(self._commands.get(timeout=wait_s))
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def _send(self, job: Job, event: Event) -> None:
        if job.channel is not None:
            self._events.append((job.channel, event))

    def _flush(self) -> None:
        """Send the events of a step together: waking an event loop for each would take longer than
        making them."""
        events, self._events = self._events, []
        for loop, own in groupby(events, lambda each: each[0].loop):
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, [*own])

    def _use_loaded(self) -> None:
        if self.provider.loaded is not None:
            self._rows = Rows(self.provider)

    def _unload_unused(self) -> None:
        """Unload the model once no request was there for `--model-ttl`. The next one loads it."""
        ttl = self._options.model_ttl
        if self.jobs or self._rows is None:
            self._used = self._now
        elif ttl is not None and self._now - self._used >= ttl:
            log.info("%s is unloaded until a request comes", self._rows.loaded.key[0])
            self.next_turns.clear()
            self._rows.close()
            self._rows = None
            self.provider.reset()
            gc.collect()
            mx.clear_cache()

    def _close(self, died: bool) -> None:
        """Fail the remaining jobs, so that no client waits for ever, and store the caches."""
        error = busy("the server is shutting down: ask again later")
        if died:
            error = APIError(503, "the generation thread has died", code="dead")
        self._refusal = error
        for job in list(self.jobs.values()):
            self._fail(job, error)
        if not died:
            self.next_turns.clear()
        self._rows = None
        self._obey(self._taken(0.0))
        self._flush()
        self.provider.reset()
        gc.collect()
        # MLX ends the process with "terminate called" if a thread's streams outlive it.
        mx.synchronize()
        mx.clear_streams()

    def _obey(self, commands: Iterable[Command]) -> None:
        for command in commands:
            try:
                command(self)
            except Exception as error:
                self._note_failed_step(error)

    def _compile(self, constraint: Constraint) -> None:
        """Compile a grammar on a thread; the first rank compiles it by itself. So no step waits for
        it when its request begins, as long as ranks are about as quick."""
        if self._ranks.rank > 0 and self.provider.loaded is not None:
            self.provider.loaded.grammars.begin_compiling(constraint)

    def _end_session(self, session: str, salt: Hashable, freed: Freed) -> None:
        self.next_turns.end_session(session, salt)
        count = 0
        try:
            count = self.provider.reuse.end_session(session, salt)
        except UnknownSession:
            # Where a job is part of it, nothing is computed yet.
            if not any(job.is_of(session, salt) for job in self.jobs.values()):
                no_session = APIError(
                    404,
                    f"there is no session {shortened(session)}: no request with your key and "
                    "cache_salt has named it, or it was ended or forgotten since; a salt goes into "
                    "the query, as ?cache_salt=alice",
                    code="session_not_found",
                )
                freed.set_exception(no_session)
                return
        except Exception as error:  # the client waits for an answer, whatever becomes of the thread
            freed.set_exception(error)
            raise
        freed.set_result(count)
        self._has_left = True

    def _note_stop(self) -> None:
        self._stopped = True

    def _refuse(self, error: APIError) -> None:
        self._refusal = error
        for job in [job for job in self.jobs.values() if job.stage == "waiting"]:
            self._fail(job, error)

    def _arrive(self, jobs: Iterable[Job]) -> None:
        self.next_turns.pause()
        for job in jobs:
            self.jobs[job.number] = job
            if self._refusal is not None:
                self._fail(job, self._refusal)
            else:
                self._admit(job, is_fetched=False)

    def _fetch(self, job: Job) -> bool:
        """Let a job wait aside while its prompt's pages are read from servers; false if there is
        nothing to read."""
        fetchers, rows, prompt = self.provider.fetchers, self._rows, job.prompt
        if not fetchers or rows is None or prompt is None or prompt.media is not None:
            return False
        if rows.loaded.key != job.model or job.prompt_logprobs is not None:
            return False
        admit = partial(GenerationThread._admit, job=job, is_fetched=True)
        own, *drafting = fetchers
        for fetcher in drafting if job.arguments.num_draft_tokens else ():
            # The job does not wait for these: they are of use once its prompt is computed.
            fetcher.begin(job.number, prompt.tokens, job.salt)
        return own.begin(job.number, prompt.tokens, job.salt, partial(self._commands.put, admit))

    def _admit(self, job: Job, *, is_fetched: bool) -> None:
        """Queue a job once its prompt is fetched, unless its client has left meanwhile."""
        if job.number not in self.jobs:
            return
        try:
            if not is_fetched and self._fetch(job):
                return
            if self._rows is not None and self._rows.loaded.key == job.model:
                self._fit(job)
            insort(self._queue, job, key=_order)
        except Exception as error:
            self._fail_to_begin(job, error)

    def _fit(self, job: Job) -> None:
        """Lower a job's `max_tokens` to what memory holds of one choice while nothing else runs.

        Raises:
            APIError: 400, it does not hold the prompt and a token.
        """
        if job.prompt is None or job.computes_nothing:
            return
        longest = self.provider.factories[0].pool.size.longest
        longest = min(self._ranks.gather("longest", longest))
        tokens, most = len(job.prompt.tokens), job.arguments.max_tokens
        if tokens >= longest:
            # As for a prompt beyond the model's context: by these words clients compact a chat.
            raise APIError(
                400,
                f"prompt is too long: {tokens} tokens > {max(0, longest - 1)} maximum, as memory "
                f"holds {longest} with the answer: shorten the prompt, or start the server with a "
                "larger --max-kv-bytes",
                code="context_length_exceeded",
            )
        job.arguments.max_tokens = int(min(most, longest - tokens))

    def _begin(self) -> None:
        """Give jobs to the batch of their model, in their order, as far as they can join it."""
        while self._queue and self._can_join(self._queue[0]):
            job = self._queue.pop(0)
            try:
                rows = self._rows_for(job)
                if job.prompt is None:
                    job.prompt = job.read(job, rows.loaded)
                if not job.computes_nothing:
                    self._fit(job)
                    rows.begin(job, job.prompt)
                    continue
                self._record_begun(job)
                self._send(job, Begun(job, rows.loaded))
                for number in job.numbers:
                    self._send(job, Empty(number))
                self._leave(job)
            except Exception as error:
                self._fail_to_begin(job, error)

    def _can_join(self, job: Job) -> bool:
        rows = self._rows
        if not rows:
            return True
        # Its model is loaded and its prompt is read while no other job runs.
        return job.prompt is not None and rows.loaded.key == job.model and rows.can_join(job.prompt)

    def _record_begun(self, job: Job) -> None:
        assert job.prompt is not None, "it was read"
        for fetcher in self.provider.fetchers[:1]:
            fetcher.end(job.number)
        job.stage = "running"
        tokens, cached = len(job.prompt.tokens), job.cached_tokens
        self.metrics.prompt_tokens += tokens
        self.metrics.cached_tokens += cached
        self.next_turns.record_begun(job)
        log.info("%s: begins, %d prompt tokens, %d cached", job.request_id, tokens, cached)

    def _refuse_late(self) -> None:
        patience_s = self._options.admission_timeout
        late = [
            job
            for job in self.jobs.values()
            if job.stage == "waiting" and job.since + patience_s <= self._now
        ]
        for job in late:
            # Not one whose prompt is still fetched.
            if job in self._queue or (self._rows and self._rows.holds(job)):
                why = (
                    f"the request could not begin in {patience_s:g} s, as {len(self._running())} "
                    "others run. Ask again later, or start the server with a larger "
                    "--max-kv-bytes, --decode-concurrency or --admission-timeout"
                )
                self._fail(job, busy(why, max(1, round(patience_s))))

    def _rows_for(self, job: Job) -> Rows:
        """The rows of a job's model, which replaces the loaded one if that is another."""
        rows = self._rows
        if rows is None or rows.loaded.key != job.model:
            if rows is not None:
                rows.close()
            self._rows, job.prompt = None, None
            try:
                self.provider.switch_to(job.model)
            finally:
                self._use_loaded()
        assert self._rows is not None, "switch_to raises if it loads nothing"
        return self._rows

    def _step(self) -> None:
        if not self._rows:
            return
        try:
            with self.watch.step(), self._ranks.computing():
                for job, event in self._rows.step():
                    if isinstance(event, Begun):
                        self._record_begun(job)
                    self.metrics.generation_tokens += isinstance(event, Token)
                    self._send(job, event)
            for job in [job for job in self._running() if not self._rows.holds(job)]:
                self._leave(job)
        except Exception as error:
            self._note_failed_step(error)
            return
        self._failed_steps = 0
        self._steps += 1
        if self._steps % COMPARED_STEPS == 0:
            for factory in self.provider.factories:
                require_same_prefixes(self._ranks, factory.pool)

    @property
    def _can_prepare(self) -> bool:
        return self._rows is not None and not self.jobs and self.next_turns.has_work

    def _prepare_next(self) -> None:
        """Compute a piece of a next turn, if there has been nothing else to do for a while."""
        is_quiet = self._now - self._used >= QUIET_S
        if self._rows is not None and self._can_prepare and is_quiet:
            with self.watch.step():
                self.next_turns.step(self._now)
            self._has_left |= not self.next_turns.has_work  # pools release what is spare

    def _note_failed_step(self, error: Exception) -> None:
        """Fail the running jobs, or the one that could not begin while none ran, and start an empty
        batch: the old one's state is unknown."""
        self._require_common(error)
        failure = _as_api_error(error, "the server failed to compute this")
        self._failed_steps += failure.status == 500
        if self._failed_steps >= MOST_FAILED_STEPS:
            raise error
        log.error("a step failed, and its requests with it", exc_info=error)
        # A kept log record would keep the caches that the traceback's frames refer to.
        traceback.clear_frames(error.__traceback__)
        rows, self._rows = self._rows, None
        if rows is None:
            return
        there = sorted(filter(rows.holds, self.jobs.values()), key=_order)
        failed = self._running() or there[:1]  # the first one could not begin
        rows.close()
        for job in failed:
            self._fail(job, failure)
        self._queue = sorted({*there, *self._queue}.difference(failed), key=_order)
        self._use_loaded()

    def _require_common(self, error: Exception) -> None:
        """Raise an error that other ranks may not have: without this one they cannot go on."""
        if self._ranks.size > 1 and not isinstance(error, COMMON_ERRORS):
            raise error

    def _fail_to_begin(self, job: Job, error: Exception) -> None:
        self._require_common(error)
        if not isinstance(error, COMMON_ERRORS):
            log.error("a request could not begin", exc_info=error)
        self._fail(job, _as_api_error(error, "the server failed to begin this: see its log"))

    def _drop_choice(self, number: int, choice: int) -> None:
        job = self.jobs.get(number)
        if self._rows and job is not None and self._rows.holds(job):
            self._rows.drop(job, choice)
            self._has_left = True
            # Release its promise now: another job, maybe of the same request, may wait for it.
            if not self._rows.holds(job):
                self._leave(job)

    def _drop(self, number: int) -> None:
        """Drop a job whose client has left, or has received everything."""
        if (job := self.jobs.get(number)) is not None:
            self._leave(job)

    def _fail(self, job: Job, error: APIError) -> None:
        log.warning("%s: refused with %d: %s", job.request_id, error.status, error)
        self._send(job, Failed(error))
        self._leave(job)

    def _leave(self, job: Job) -> None:
        for fetcher in self.provider.fetchers:
            fetcher.end(job.number)
        if job in self._queue:
            self._queue.remove(job)
        if self._rows is not None:
            self._rows.drop(job)
        self.jobs.pop(job.number, None)  # last: without jobs, others take the pools for idle
        self._has_left = True

    def _running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.stage == "running"]


def _deliver(events: Iterable[tuple[Channel, Event]]) -> None:
    for channel, event in events:
        channel.events.put_nowait(event)


def _order(job: Job) -> tuple[int, int]:
    """What jobs are sorted by: their priority, and their arrival."""
    return job.priority, job.number


def _as_api_error(error: Exception, otherwise: str) -> APIError:
    """What a client is told of an error, which for most kinds of errors is `otherwise`."""
    if isinstance(error, APIError):
        return error
    if is_shortage(error):  # what is in use is freed now
        return no_memory()
    if isinstance(error, PoolExhausted):  # or the folder for pages out of memory is full
        return busy(str(error))
    return APIError(500, otherwise, code="internal")
