"""mlx_lm.server answers the same on installed paged caches as on its own."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from time import monotonic, sleep
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate, server
from mlx_lm.models.cache import LRUPromptCache

from paged_kv import PagedCacheFactory, PagedKVCache
from tests.support.generation import assert_written_and_free
from tests.support.running_server import PATIENCE_S, StockServer

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended for production")

Serve = Callable[..., Any]


class Server(StockServer):
    """The server that `mlx_lm.server.main` runs, with a way to stop it."""

    def __init__(self, provider: Any) -> None:
        prompt_cache = LRUPromptCache(provider.cli_args.prompt_cache_size)
        generator = server.ResponseGenerator(provider, prompt_cache)
        super().__init__(generator)

    def post(self, **body: Any) -> tuple[int, str]:
        """Status and body of one completion request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        answer = response.status, response.read().decode()
        connection.close()
        return answer

    def complete(self, **body: Any) -> dict[str, Any]:
        """The text that a client reads, why it ended, and token counts."""
        status, text = self.post(**body)
        assert status == 200, text
        answer = json.loads(text)
        choice = answer["choices"][0]
        return {"text": choice["text"], "end": choice["finish_reason"], "usage": answer["usage"]}

    def stream(self, **body: Any) -> dict[str, Any]:
        """The same from a stream of events."""
        options = {"include_usage": True}
        status, text = self.post(stream=True, stream_options=options, **body)
        assert status == 200, text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if "data: " in line]
        assert events.pop() == "[DONE]"
        usage = json.loads(events.pop())["usage"]
        choices = [json.loads(event)["choices"][0] for event in events]
        assert len(choices) > 2
        texts = [choice["text"] for choice in choices]
        return {"text": "".join(texts), "end": choices[-1]["finish_reason"], "usage": usage}


@pytest.fixture
def model_and_tokenizer(trained: Any) -> Any:
    model, tokenizer = trained("stdlib-llama")
    # Another thread will generate, and cannot compute this thread's lazy arrays.
    mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture
def serve(model_and_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A context manager (clients, *arguments) -> Server, with the given model in place of any
    other.

    It loads the model when so many clients wait, so that their requests become one batch.
    """

    @contextmanager
    def running(clients: int = 1, *arguments: str) -> Iterator[Server]:
        started: list[Server] = []

        def load(path: str, **options: Any) -> Any:
            deadline = monotonic() + PATIENCE_S
            while not started or started[0].generator.requests.qsize() < clients:
                assert monotonic() < deadline
                sleep(0.01)
            return (*model_and_tokenizer, {}) if options else model_and_tokenizer

        monkeypatch.setattr(server, "load", load)
        always = ["server", "--model", "any", "--max-tokens", "24"]
        monkeypatch.setattr(sys, "argv", [*always, *arguments])
        monkeypatch.setattr(
            server, "run", lambda host, port, provider: started.append(Server(provider))
        )
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


def spy_on_batches(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of sequences that steps will have written."""
    sizes: set[int] = set()
    write = PagedKVCache.update_and_fetch

    def spied(cache: PagedKVCache, keys: mx.array, values: mx.array) -> Any:
        sizes.add(keys.shape[0])
        return write(cache, keys, values)

    monkeypatch.setattr(PagedKVCache, "update_and_fetch", spied)
    return sizes


def conversation(serve: Serve, prompts: list[str]) -> list[Any]:
    """Clients that ask at the same time, half of them with streams, and one that asks
    afterwards."""
    with serve(len(prompts)) as running, ThreadPoolExecutor(len(prompts)) as clients:
        asked = [
            clients.submit(running.stream if number % 2 else running.complete, prompt=prompt)
            for number, prompt in enumerate(prompts)
        ]
        answers = [answer.result() for answer in asked]
        further = prompts[-1] + answers[-1]["text"] + "\n"
        return [*answers, running.complete(prompt=further)]


@pytest.mark.slow
def test_concurrent_clients_read_the_same_text(
    serve: Serve, prompts: list[str], factory: PagedCacheFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = conversation(serve, prompts)
    batches = spy_on_batches(monkeypatch)
    with factory:
        assert conversation(serve, prompts) == stock
    assert max(batches) == len(prompts)
    # The server's prompt cache had most of the last prompt.
    assert stock[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    assert_written_and_free(factory)


@pytest.mark.slow
def test_requests_that_cannot_be_batched_read_the_same_text(
    serve: Serve, prompts: list[str], factory: PagedCacheFactory
) -> None:
    """With a seed, or with a draft model, the server generates for one client at a time."""

    def answers(*arguments: str) -> list[Any]:
        with serve(1, *arguments) as running:
            # The second time, the server trims the cache that it has kept.
            return [running.complete(prompt=prompts[3], seed=1) for _ in range(2)]

    draft = ["--draft-model", "the same"]
    stock = [answers(), answers(*draft)]
    with factory:
        assert [answers(), answers(*draft)] == stock
    assert_written_and_free(factory)


def test_prompts_that_the_server_keeps_share_their_pages(
    serve: Serve, prompts: list[str], factory: PagedCacheFactory
) -> None:
    with factory, serve() as running:
        for ending in ("", "a", "b", "c"):
            # More than a block, so that one block is full and stays shared.
            running.complete(prompt="".join(prompts) + ending, max_tokens=1)
        # Clients get their answer before the server keeps the last prompt.
        assert len(running.generator.prompt_cache) >= 3
        assert factory.stats().table_entries > factory.stats().blocks_used > 0
    assert_written_and_free(factory)


def test_a_server_that_is_told_to_quantise_keeps_quantised_pages(
    serve: Serve, prompts: list[str], factory: PagedCacheFactory
) -> None:
    told = ["--kv-bits", "8", "--quantized-kv-start", "0"]
    with factory, serve(1, *told) as running:
        prompt = 20 * prompts[0]
        answers = [running.complete(prompt=prompt, max_tokens=8) for _ in range(2)]
        assert answers[0]["text"] == answers[1]["text"]
        assert factory.stats().blocks_by_format["q8"] > 0
    assert_written_and_free(factory)


def test_a_stopped_server_leaves_a_pool_that_other_threads_can_use(
    serve: Serve, prompts: list[str], factory: PagedCacheFactory, model_and_tokenizer: Any
) -> None:
    """Slabs hold nothing that only the ended thread could compute."""
    model, tokenizer = model_and_tokenizer
    stock = generate(model, tokenizer, prompts[3], max_tokens=16)
    with factory:
        with serve() as running:
            running.complete(prompt=prompts[3])
        assert generate(model, tokenizer, prompts[3], max_tokens=16) == stock
    assert_written_and_free(factory)
