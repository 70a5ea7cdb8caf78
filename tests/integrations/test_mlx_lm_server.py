"""mlx_lm.server answers the same on installed paged caches as on its own."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache

from paged_kv import PagedCacheFactory
from tests.support.generation import assert_written_and_free
from tests.support.running_server import StockServer, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended for production")

Serve = Callable[..., Any]


def complete(running: StockServer, **body: Any) -> Any:
    """The text that a client reads, why it ended, and token counts."""
    with running.client() as client:
        answer = client.completions.create(model="default_model", **body)
    choice = answer.choices[0]
    assert answer.usage is not None
    return choice.text, choice.finish_reason, answer.usage.to_dict()


@pytest.fixture
def serve(model_and_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A context manager (clients, *arguments) -> the server that `mlx_lm.server.main` runs, with
    the given model in place of any other.

    It loads the model when so many clients wait, so that their requests become one batch.
    """

    @contextmanager
    def running(clients: int = 1, *arguments: str) -> Iterator[StockServer]:
        started: list[StockServer] = []

        def load(path: str, **options: Any) -> Any:
            wait_until(lambda: bool(started) and started[0].generator.requests.qsize() >= clients)
            return (*model_and_tokenizer, {}) if options else model_and_tokenizer

        def run(host: str, port: int, provider: Any) -> None:
            prompts = LRUPromptCache(provider.cli_args.prompt_cache_size)
            started.append(StockServer(server.ResponseGenerator(provider, prompts)))

        monkeypatch.setattr(server, "load", load)
        always = ["server", "--model", "any", "--max-tokens", "24"]
        monkeypatch.setattr(sys, "argv", [*always, *arguments])
        monkeypatch.setattr(server, "run", run)
        server.main()
        try:
            yield started[0]
        finally:
            started[0].stop()

    return running


@pytest.fixture
def prompts(model_and_tokenizer: Any, source_text: str) -> list[str]:
    """Texts of different lengths. One of them crosses a page border during generation."""
    tokenizer = model_and_tokenizer[1]
    tokens = tokenizer.encode(source_text[20000:22500])
    texts = [tokenizer.decode(tokens[start : start + 40 + start]) for start in (0, 50, 90)]
    return [*texts, tokenizer.decode(tokens[100:346])]


@pytest.fixture
def factory(model_and_tokenizer: Any) -> PagedCacheFactory:
    return PagedCacheFactory(model_and_tokenizer[0], max_bytes=128 << 20)


def conversation(serve: Serve, prompts: list[str]) -> list[Any]:
    """Clients that ask at the same time, and one that asks afterwards."""
    with serve(len(prompts)) as running, ThreadPoolExecutor(len(prompts)) as clients:
        asked = [clients.submit(complete, running, prompt=prompt) for prompt in prompts]
        answers = [answer.result() for answer in asked]
        return [*answers, complete(running, prompt=prompts[-1] + answers[-1][0] + "\n")]


@pytest.mark.slow
def test_concurrent_clients_read_the_same_text(
    serve: Serve, prompts: list[str], factory: PagedCacheFactory
) -> None:
    stock = conversation(serve, prompts)
    with factory:
        assert conversation(serve, prompts) == stock
    # The server's prompt cache had most of the last prompt.
    assert stock[-1][2]["prompt_tokens_details"]["cached_tokens"] > 200
    assert_written_and_free(factory)
