"""Starts the server, runs it and shuts it down.

On a signal the server refuses new requests, finishes the running ones and stores cached prefixes.
While its model loads there are none: then it exits without waiting for the model. If the generation
thread dies, /health reports it for a moment, and the server exits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import mlx.core as mx
import uvicorn
from mlx.utils import tree_flatten
from starlette.concurrency import run_in_threadpool

from paged_kv.allocator.errors import PagedKVError
from paged_kv.checks import format_size
from paged_kv.openblas import blas_name
from paged_kv.options import not_loaded
from paged_kv.server import status_page
from paged_kv.server.app import make_app
from paged_kv.server.completions.service import Service
from paged_kv.server.engine.generation_thread import GenerationThread
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.server_metrics import ServerMetrics
from paged_kv.server.http.api_errors import busy
from paged_kv.server.http.connection import limited
from paged_kv.server.options import ServerOptions
from paged_kv.server.signals import ending_in_order, ignored


def ready_line(host: str, port: int, name: str, provider: PagedModelProvider) -> str:
    """The address, and what serves there; `name` is the model's, as answers have it."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    parts = [f"ready at {address}", f"page {address}/kv"]
    if not provider.factories:
        return ", ".join([*parts, "no model yet: requests name one"])
    pool = provider.factories[0].pool
    parts += [f"model {name}", f"backend {pool.backend.name}"]
    if blas := blas_name():
        parts.append(f"BLAS {blas}")
    # The number format that the model computes in is that of its weights, or of their scales.
    model: Any = provider.model
    arrays: Any = tree_flatten(model.parameters())
    found = (each.dtype for _, each in arrays if mx.issubdtype(each.dtype, mx.floating))
    numbers = str(next(found, "unknown")).removeprefix("mlx.core.")
    parts += [f"numbers {numbers}", f"pages {provider.options.cache.page_format}"]
    budget = sum(factory.pool.budget.max_bytes for factory in provider.factories)
    return ", ".join([*parts, f"up to {format_size(budget)} of them"])


log = logging.getLogger(__name__)

# How long /health reports a dead generation thread before the exit, so that a probe can see it.
DEATH_NOTICE_S = 3.0

# How often the server looks whether its step hangs.
LOOKED_S = 5.0

# How long the server has after the time for running requests: to refuse those that are left, to end
# its step, and to write what is queued for the store.
LAST_S = 5.0


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: uvicorn's end the process by a signal, not an exit status."""
        yield


class PagedServer:
    """A server whose socket listens from its construction on.

    Raises:
        ValueError: an option is wrong.
        OSError: the host does not exist, the port is in use, or a file of keys cannot be read.
    """

    def __init__(self, options: ServerOptions, provider: PagedModelProvider) -> None:
        self.service = Service(options, provider)
        self._socket = _listening(options.host, options.port)
        config = uvicorn.Config(
            make_app(self.service),
            http=limited(options.max_connections, options.header_timeout, options.write_timeout),
            loop="asyncio",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = _Uvicorn(config)
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def run(self) -> int:
        """Serve until `end` is called or the generation thread dies; return the exit status. If it
        is called while the model loads, the generation thread still runs."""
        thread = self.service.thread
        log.info("starting: listening at %s, port %d", self.service.options.host, self.port)
        # What the first requests would import, before the generation thread does imports too.
        self._uvicorn.config.load()
        with suppress(ValueError):
            await run_in_threadpool(status_page.metrics_module)
        thread.start()
        telling = asyncio.ensure_future(self._tell_when_ready())
        watching = asyncio.ensure_future(self._tell_when_hanging())
        serving = asyncio.ensure_future(self._uvicorn.serve([self._socket]))
        ending = asyncio.ensure_future(self._ending.wait())
        died = asyncio.wrap_future(thread.ended)
        events: set[asyncio.Future[Any]] = {serving, ending, died}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if died.done() and not died.result() and thread.loaded.exception() is None:
            await asyncio.wait({ending}, timeout=DEATH_NOTICE_S)
        else:
            await self._drain()
        thread.stop()
        if thread.loaded.done():
            await died
        ending.cancel()
        telling.cancel()
        watching.cancel()
        self._uvicorn.should_exit = True
        await serving
        self.service.workers.close()
        return 0 if not died.done() or died.result() else 1

    def end(self) -> None:
        """Let `run` finish the running requests and return; a second call ends the waiting."""
        if self._ending.is_set():
            self._hurry.set()
        self._ending.set()

    async def _tell_when_ready(self) -> None:
        """Log that the model is loaded. If it cannot be, the end of the process says why."""
        loaded = asyncio.wrap_future(self.service.thread.loaded)
        # To wait for it with `await` would let a signal cancel it for the thread too.
        await asyncio.wait({loaded})
        if loaded.exception() is None:
            name, provider = self.service.names.public_name(None), self.service.thread.provider
            log.info(ready_line(self.service.options.host, self.port, name, provider))

    async def _tell_when_hanging(self) -> None:
        """Log what a step computes that hangs, once for each such step."""
        thread = self.service.thread
        told = False
        while True:
            await asyncio.sleep(LOOKED_S)
            if (hangs := thread.watch.is_hanging) and not told:
                log.error("%s", thread.described_step())
            told = hangs

    async def _drain(self) -> None:
        """Refuse new requests, and wait for the running ones."""
        refusal = busy("the server is shutting down: ask again later")
        self.service.gate.close(refusal)
        self.service.thread.refuse(refusal)
        seconds, inside = self.service.options.shutdown_timeout, self.service.gate.inside
        if not self.service.thread.loaded.done():
            log.info("ending before the model has loaded")
        elif not inside:
            log.info("ending: no request runs")
        else:
            have = "request has" if inside == 1 else "requests have"
            told = "ending: %d %s %g s to finish; a second signal (Ctrl-C) ends at once"
            log.info(told, inside, have, seconds)
        empty = asyncio.ensure_future(self.service.gate.wait_until_empty())
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({empty, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        empty.cancel()
        hurry.cancel()


def run_server(options: ServerOptions, provider: PagedModelProvider) -> int:
    """Serve until a signal comes; return the exit status. If it comes while the model loads, which
    nothing can interrupt, end the process.

    Raises:
        Exception: as `PagedServer`, or the model could not be loaded.
    """

    async def run() -> tuple[int, GenerationThread]:
        server = PagedServer(options, provider)
        loop = asyncio.get_running_loop()
        end = partial(loop.call_soon_threadsafe, server.end)
        with ending_in_order(end, options.shutdown_timeout + LAST_S):
            return await server.run(), server.service.thread

    status, thread = asyncio.run(run())
    if not thread.loaded.done():
        logging.shutdown()
        os._exit(status)
    require_loaded(thread, provider)
    return status


def follow(provider: PagedModelProvider) -> int:
    """Compute what rank 0 decides, until it ends; returns the exit status. Signals are for rank 0:
    without this rank it could not finish its requests."""
    with ignored():
        thread = GenerationThread(provider, ServerMetrics())
        thread.start()
        has_ended_well = thread.ended.result()
    require_loaded(thread, provider)
    return 0 if has_ended_well else 1


def require_loaded(thread: GenerationThread, provider: PagedModelProvider) -> None:
    """Raise why the model could not be loaded, if so. It waits until that is known."""
    error = thread.loaded.exception()
    if isinstance(error, PagedKVError | MemoryError | OSError | ValueError):
        raise error
    if error is not None:
        # A broken file of a model raises errors of many types.
        raise not_loaded("--model", str(provider.options.model), error) from error


def _listening(host: str, port: int) -> socket.socket:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            f"cannot listen at {host}, port {port} ({error.strerror}): choose another --host or "
            "--port, or 0 for any free port"
        ) from None
