"""A server in threads of this process, mlx-lm's own or the one on paged caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Event, Thread
from time import sleep
from typing import Any

from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache
from openai import OpenAI

from paged_kv.integrations.paged_model_provider import PagedModelProvider
from paged_kv.integrations.paged_server import PagedAPIHandler, PagedResponseGenerator
from paged_kv.integrations.server_command import server_parser
from tests.patience import PATIENCE_S as PATIENCE_S
from tests.patience import wait_until as wait_until


class RunningServer:
    """Answers what `generator` generates on a free port, until `stop`."""

    def __init__(self, generator: Any, handler_class: Any) -> None:
        self.generator = generator
        self._handler_class = handler_class
        self._listening = Event()
        self._http: ThreadingHTTPServer | None = None
        self._thread = Thread(target=self._serve)
        self._thread.start()
        assert self._listening.wait(PATIENCE_S)

    @property
    def port(self) -> int:
        assert self._http is not None
        return self._http.server_port

    @property
    def pools(self) -> list[Any]:
        """Of the loaded models."""
        return [factory.pool for factory in self.generator.model_provider.factories]

    def client(self, **options: Any) -> OpenAI:
        """A client that asks once, and does not wait for ever."""
        defaults = {"max_retries": 0, "timeout": PATIENCE_S}
        url = f"http://127.0.0.1:{self.port}/v1"
        return OpenAI(base_url=url, api_key="none", **{**defaults, **options})

    def wait_until_idle(self) -> None:
        """Until no request is promised anything, and no client waits."""
        wait_until(lambda: not self.generator.admission._promised)
        wait_until(lambda: not len(self.generator.admission))

    def stop(self) -> None:
        """End both threads; the generating one drops its caches itself."""
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.generator.stop_and_join()

    def _serve(self) -> None:
        outer = self

        class Http(ThreadingHTTPServer):
            def server_activate(self) -> None:
                super().server_activate()
                outer._http = self
                outer._listening.set()

        server._run_http_server(
            "127.0.0.1", 0, self.generator, server_class=Http, handler_class=self._handler_class
        )


@contextmanager
def paged_server(*options: str) -> Iterator[RunningServer]:
    """What `paged-kv server` runs with these options."""
    arguments = server_parser().parse_args(options)
    generator = PagedResponseGenerator(PagedModelProvider(arguments))
    running = RunningServer(generator, PagedAPIHandler)
    try:
        wait_until(lambda: generator.model_provider.factories)
        yield running
        assert generator.is_healthy, "the generation thread has died"
    finally:
        running.stop()


@contextmanager
def stock_server(*options: str) -> Iterator[RunningServer]:
    """What `mlx_lm.server` runs with these options."""
    provider = server.ModelProvider(server_parser().parse_args(options))
    generator = server.ResponseGenerator(provider, LRUPromptCache(10))
    running = RunningServer(generator, server.APIHandler)
    try:
        yield running
    finally:
        running.stop()


def assert_idle_pools_hold_nothing(running: RunningServer) -> None:
    """Every block has come back but those of kept prompts, and those do when they are forgotten."""
    running.wait_until_idle()
    # Requests end just before the server keeps their prompts.
    sleep(0.2)
    for pool in running.pools:
        wait_until(lambda pool=pool: not pool.stats().blocks_used)
        pool.check()
        assert pool.stats().allocation_failures == 0
        pool.clear()
        pool.check()
        assert pool.stats().blocks_used == pool.stats().blocks_cached == 0
