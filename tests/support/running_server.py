"""Runs a server in threads of this process: mlx-lm's own, or the one on paged caches."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache
from openai import OpenAI

from paged_kv.pool.page_pool import PagePool
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.rows import Rows
from paged_kv.server.lifecycle import PagedServer
from paged_kv.server.options import parsed_server_options
from tests.support.patience import PATIENCE_S as PATIENCE_S
from tests.support.patience import wait_until as wait_until
from tests.support.zoo import small_model

# Makes the tokens that a seed draws independent of rounding. MLX draws from the running sum of the
# probabilities, where thousands of unlikely tokens lie as close together as two steps of different
# shapes round, on some processors.
FEW_LIKELY = {"top_k": 4}


class RunningServer:
    """A server on a free port of this machine, until `stop`."""

    port: int

    def client(self, **options: Any) -> OpenAI:
        """A client that asks once, with a time limit."""
        defaults = {"max_retries": 0, "timeout": PATIENCE_S, "api_key": "none"}
        url = f"http://127.0.0.1:{self.port}/v1"
        return OpenAI(base_url=url, **{**defaults, **options})

    def stop(self) -> None:
        """End all of its threads."""
        raise NotImplementedError


class StockServer(RunningServer):
    """mlx-lm's HTTP server, for a generator of responses."""

    _http: ThreadingHTTPServer

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self._listening = Event()
        self._thread = Thread(target=self._serve)
        self._thread.start()
        assert self._listening.wait(PATIENCE_S)

    def stop(self) -> None:
        """The generating thread drops its own caches."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.generator.stop_and_join()

    def _serve(self) -> None:
        outer = self

        class Http(ThreadingHTTPServer):
            def server_activate(self) -> None:
                super().server_activate()
                outer._http, outer.port = self, self.server_port
                outer._listening.set()

        server._run_http_server("127.0.0.1", 0, self.generator, server_class=Http)


class PagedRunningServer(RunningServer):
    """Runs what `paged-kv server` runs, in an event loop of its own.

    Its budget is not measured unless a test asks for "auto": that takes seconds for each model.
    """

    def __init__(self, *options: str) -> None:
        usual = ["--port", "0", "--max-kv-bytes", "256MB"]
        arguments = parsed_server_options([*usual, *options])
        self.provider = PagedModelProvider(arguments)
        self._arguments = arguments
        self._listening = Event()
        self._thread = Thread(target=self._serve)
        self._thread.start()
        assert self._listening.wait(PATIENCE_S)
        self.service = self.server.service
        self.port = self.server.port
        self.service.thread.loaded.result(PATIENCE_S)

    @property
    def pools(self) -> list[Any]:
        """The pools of the loaded models."""
        return [factory.pool for factory in self.provider.factories]

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits, and no next turn is prepared."""
        gate, thread = self.service.gate, self.service.thread
        wait_until(lambda: not (gate.inside or thread.jobs or thread.next_turns.has_work))

    def hold_until_submitted(self, jobs: int) -> None:
        """Let the generation thread begin nothing before so many jobs have come, so that it begins
        them in one step, however slowly this machine runs the clients."""
        commands = self.service.thread._commands
        commands.put(lambda thread: wait_until(lambda: commands.qsize() >= jobs))

    def end(self) -> None:
        """Stop as a signal does."""
        self.loop.call_soon_threadsafe(self.server.end)

    def stop(self) -> None:
        """Stop at once, without finishing requests."""
        self.end()
        self.end()
        self.join()

    def join(self) -> int:
        """Wait for the end; returns the exit status."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.status

    def _serve(self) -> None:
        async def run() -> int:
            self.server = PagedServer(self._arguments, self.provider)
            self.loop = asyncio.get_running_loop()
            self._listening.set()
            return await self.server.run()

        self.status = asyncio.run(run())


@contextmanager
def in_float32() -> Iterator[None]:
    """Make servers load models in float32. In 16 bits two tokens are often equally likely, so the
    batch decides between them; and a CPU takes longer."""

    def load(path: str, **options: Any) -> Any:
        loaded = mlx_lm.load(path, **options)
        loaded[0].set_dtype(mx.float32)
        return loaded

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "load", load)
        yield


@contextmanager
def with_small_model() -> Iterator[None]:
    """Make servers load the given tokenizer and a tiny random llama with its vocabulary, for tests
    in which the model does not matter."""

    def load(path: str, **options: Any) -> Any:
        loaded = mlx_lm.load(path, lazy=True, **options)
        return (small_model("llama", vocab_size=loaded[1].vocab_size), *loaded[1:])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "load", load)
        yield


@contextmanager
def paged_server(*options: str) -> Iterator[PagedRunningServer]:
    """The server of `paged-kv server` with these options."""
    running = PagedRunningServer(*options)
    try:
        yield running
        assert running.service.is_healthy, "the generation thread has died"
    finally:
        running.stop()


@contextmanager
def stock_server(*options: str) -> Iterator[StockServer]:
    """The server of `mlx_lm.server` with these options."""
    cli_args: Any = parsed_server_options(options)
    provider = server.ModelProvider(cli_args)
    running = StockServer(server.ResponseGenerator(provider, LRUPromptCache(10)))
    try:
        yield running
    finally:
        running.stop()


def noted_prompts(running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which the texts of all coming prompts are added."""
    thread = running.service.thread
    tokenizer: Any = running.provider.tokenizer
    texts: list[str] = []
    submit = thread.submit

    def noted(jobs: Any) -> None:
        texts.extend(tokenizer.decode(job.prompt.tokens) for job in jobs)
        submit(jobs)

    monkeypatch.setattr(thread, "submit", noted)
    return texts


@contextmanager
def failing_after_a_step() -> Iterator[None]:
    """Let the generation thread's first step work, and all later ones fail."""
    steps = iter([Rows.step])

    def step(rows: Rows) -> Any:
        for works in steps:
            return works(rows)
        raise RuntimeError("a secret")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Rows, "step", step)
        yield


def is_settled(pool: PagePool) -> bool:
    """Whether a pool has given back what it does not keep for later steps."""
    formats = pool.stats().formats
    return all(
        each.spare + each.fragmented <= max(1, (each.used + each.cached) // 8) for each in formats
    )


def assert_idle_pools_hold_nothing(running: PagedRunningServer) -> None:
    """Check that only kept prompts hold blocks, few others are mapped, and that these come back
    when the prompts are dropped."""
    running.wait_until_idle()
    for pool in running.pools:
        wait_until(lambda pool=pool: is_settled(pool))
        pool.index.holds.expire(math.inf)
        assert pool.stats().blocks_used == 0
        pool.check()
        pool.clear()
        pool.check()
        assert pool.stats().blocks_used == pool.stats().blocks_cached == 0
