"""Starts the server, runs it and shuts it down.

On a signal the server refuses new requests, finishes the running ones and stores cached prefixes.
If the generation thread dies, /health reports it for a moment, and the server exits.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from paged_kv.integrations.server.app import make_app
from paged_kv.integrations.server.completions.model_names import ModelNames
from paged_kv.integrations.server.completions.prompt_reader import ReaderThreads
from paged_kv.integrations.server.completions.service import Service
from paged_kv.integrations.server.generation.generation_thread import GenerationThread
from paged_kv.integrations.server.generation.paged_model_provider import PagedModelProvider
from paged_kv.integrations.server.generation.server_metrics import ServerMetrics
from paged_kv.integrations.server.http.access import APIKeys, KnownHosts, read_api_keys
from paged_kv.integrations.server.http.api_errors import busy
from paged_kv.integrations.server.http.connection import limited
from paged_kv.integrations.server.http.gate import Gate

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)

# How long /health reports a dead generation thread before the exit, so that a probe can see it.
DEATH_NOTICE_S = 3.0


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: uvicorn's end the process by a signal, not an exit status."""
        yield


class PagedServer:
    """A server whose socket listens from its construction on.

    Args:
        options: of `paged-kv server`.
        provider: loads models.

    Raises:
        ValueError: an option is wrong.
        OSError: the host does not exist, the port is in use, or a file of keys cannot be read.
    """

    def __init__(self, options: argparse.Namespace, provider: PagedModelProvider) -> None:
        keys = APIKeys(read_api_keys(options.api_key))
        metrics = ServerMetrics()
        self.service = Service(
            options=options,
            thread=GenerationThread(provider, metrics),
            metrics=metrics,
            names=ModelNames(options),
            keys=keys,
            hosts=KnownHosts(options.host),
            readers=ReaderThreads(),
            gate=Gate(),
        )
        self._socket = _listening(options.host, options.port)
        self._uvicorn = _Uvicorn(self._config())
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._socket.getsockname()[1])

    async def run(self) -> int:
        """Serve until `end` is called or the generation thread dies; return the exit status."""
        thread = self.service.thread
        log.info("listening at %s, port %d", self.service.options.host, self.port)
        thread.start()
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
        await died
        ending.cancel()
        self._uvicorn.should_exit = True
        await serving
        self.service.readers.close()
        return 0 if died.result() else 1

    def end(self) -> None:
        """Let `run` finish the running requests and return; a second call ends the waiting."""
        if self._ending.is_set():
            self._hurry.set()
        self._ending.set()

    async def _drain(self) -> None:
        """Refuse new requests, and wait for the running ones."""
        refusal = busy("the server is shutting down: ask again later")
        self.service.gate.close(refusal)
        self.service.thread.refuse(refusal)
        seconds = self.service.options.shutdown_timeout
        log.info("ending: %d requests have %g s to finish", self.service.gate.inside, seconds)
        empty = asyncio.ensure_future(self.service.gate.wait_until_empty())
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({empty, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        empty.cancel()
        hurry.cancel()

    def _config(self) -> uvicorn.Config:
        options = self.service.options
        return uvicorn.Config(
            make_app(self.service),
            http=limited(options.max_connections, options.header_timeout),
            loop="asyncio",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )


def run_server(options: argparse.Namespace, provider: PagedModelProvider) -> int:
    """Serve until a signal comes; return the exit status.

    Raises:
        Exception: as `PagedServer`, or the model could not be loaded.
    """

    async def run() -> int:
        server = PagedServer(options, provider)
        loop = asyncio.get_running_loop()
        for each in SIGNALS:
            loop.add_signal_handler(each, server.end)
        status = await server.run()
        not_loaded = server.service.thread.loaded.exception()
        if not_loaded is not None:
            raise not_loaded
        return status

    return asyncio.run(run())


def follow(provider: PagedModelProvider) -> int:
    """Compute what rank 0 decides, until it ends; returns the exit status. Signals are for rank 0:
    without this rank it could not finish its requests."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    thread = GenerationThread(provider, ServerMetrics())
    thread.start()
    has_ended_well = thread.ended.result()
    if (not_loaded := thread.loaded.exception()) is not None:
        raise not_loaded
    return 0 if has_ended_well else 1


def _listening(host: str, port: int) -> socket.socket:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = infos[0]
    return socket.create_server(address[:2], family=family, backlog=2048)
