"""Loads `mlx_lm.server` and `paged-kv server` over HTTP:
python -m benches.serving_http [serving_http | serving_shared]

Each is a process of its own, on SmolLM2 in float32 and on loopback. Clients, threads of this
process, ask for streams of text, greedy. Both servers take turns.

serving_http      16 clients. One with its answer sends the next request of a list drawn from one
                  seed: prompts of 64 to 1,000 tokens of Python's standard library, and 16 to 96 new
                  tokens. The prompts of each run are new to the server: runs differ in where texts
                  begin
serving_shared    8 clients ask at once, each a prompt of 1,400 tokens that all have in common and
                  32 of its own, and 64 new tokens. Each run has two waves: the common tokens of the
                  first are new to the servers, and those of the second are the same, behind them
                  other ones

Figures are of all requests of all runs together.

    tokens a second    generated tokens over the time from the first request to the last answer
    first token        from sending the request to the first text of its answer
    per token          from the first text to the last, over the tokens between them
    whole answer       from sending the request to the end of its answer
"""

from benches.openblas import BLAS

import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_tokenizer

from benches.models import source_tokens
from benches.real_models.folders import model_folder
from benches.results_file import write_result
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
MODEL, SEED = "smollm2", 0
CLIENTS, REQUESTS, REPETITIONS = 16, 32, 1
PROMPT_TOKENS, NEW_TOKENS = (64, 1_000), (16, 96)
SHARING_CLIENTS, SHARING_REPETITIONS, WAVES = 8, 2, ("new", "known")
SHARED_TOKENS, OWN_TOKENS, SHARING_NEW_TOKENS = 1_400, 32, 64
# Characters of source that hold the longest prompt.
WINDOW, SHARED_WINDOW = 6_000, 14_000
# mlx-lm's does not load OpenBLAS by itself.
_STOCK = "import benches.openblas, mlx_lm.server; mlx_lm.server.main()"
COMMANDS = {
    "mlx_lm": ["-c", _STOCK],
    "paged": ["-m", "paged_kv", "server", "--max-kv-bytes", "2GB"],
}
START_S = 300


@dataclass(frozen=True)
class Request:
    """What a client sends. `model` is the name of the server's model."""

    prompt: str
    max_tokens: int
    model: str = "default_model"


@dataclass
class Answer:
    """What came, and when, in seconds from when it was asked."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    whole: float = 0.0


@dataclass
class Load:
    """All runs of one server."""

    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def make_requests(tokenizer: Any, repetition: int) -> list[Request]:
    """The load of one run."""
    rng = random.Random(f"{SEED} {repetition}")
    requests = []
    for _ in range(REQUESTS):
        tokens = source_tokens(rng, tokenizer, WINDOW)[: rng.randint(*PROMPT_TOKENS)]
        requests.append(Request(tokenizer.decode(tokens), rng.randint(*NEW_TOKENS)))
    return requests


def make_sharing_requests(tokenizer: Any, repetition: int, wave: str) -> list[Request]:
    """The load of one wave."""
    rng = random.Random(f"{SEED} {repetition}")
    tokens = source_tokens(rng, tokenizer, SHARED_WINDOW, least=60_000)
    shared = tokens[:SHARED_TOKENS]
    assert len(shared) == SHARED_TOKENS
    own, requests = random.Random(f"{SEED} {repetition} {wave}"), []
    for _ in range(SHARING_CLIENTS):
        at = own.randrange(len(tokens) - OWN_TOKENS)
        prompt = tokenizer.decode([*shared, *tokens[at : at + OWN_TOKENS]])
        requests.append(Request(prompt, SHARING_NEW_TOKENS))
    return requests


def answered(port: int, request: Request) -> Answer:
    """One request, asked again where the connection breaks: mlx_lm.server accepts five at a time,
    and others may be reset. That counts as time."""
    began = perf_counter()
    while True:
        lost = perf_counter() - began
        try:
            answer = ask(port, request)
        except ConnectionError:
            continue
        answer.first, answer.last = answer.first + lost, answer.last + lost
        answer.whole += lost
        return answer


def ask(port: int, request: Request, path: str = "") -> Answer:
    """One request, streamed."""
    body = {
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, began = Answer(), perf_counter()
    for event in events(port, body, f"{path}/v1/completions"):
        now = perf_counter() - began
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
        if event["choices"] and (text := event["choices"][0]["text"]):
            answer.text += text
            answer.first = answer.first or now
            answer.last = now
    answer.whole = perf_counter() - began
    return answer


def events(
    port: int, body: dict[str, Any], path: str = "/v1/completions"
) -> Iterator[dict[str, Any]]:
    """The events of an answer as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
    connection.close()


def run(port: int, requests: Sequence[Request], load: Load, at_once: int) -> None:
    """All requests of one run, of so many clients at once."""
    began = perf_counter()
    with ThreadPoolExecutor(at_once) as clients:
        load.answers += clients.map(lambda request: answered(port, request), requests)
    load.seconds.append(perf_counter() - began)
    print(f"port {port}: {load.seconds[-1]:.1f} s", flush=True)


@contextmanager
def server(name: str, model: Path, *more: str) -> Iterator[int]:
    """A server in a process of its own, once it answers; its port."""
    port = free_port()
    options = ["--model", str(model), "--port", str(port), "--log-level", "ERROR", *more]
    with answering(port, "default_model", [*COMMANDS[name], *options]):
        yield port


@contextmanager
def answering(
    port: int, model: str, command: Sequence[str], **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Python with these arguments, once it answers requests for a model at a port.

    Raises:
        RuntimeError: it does not; the message has what it has written.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )
        try:
            deadline = perf_counter() + START_S
            while not _answers(port, model):
                if process.poll() is not None or perf_counter() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{command} does not answer: {log.read().decode()}")
                sleep(0.2)
            yield process
        finally:
            process.kill()
            process.wait()


def _answers(port: int, model: str) -> bool:
    try:
        ask(port, Request("import", 1, model))
    except (AssertionError, OSError):  # it may refuse while it loads the model
        return False
    return True


@contextmanager
def both_servers() -> Iterator[tuple[Any, dict[str, int]]]:
    """The tokenizer, and the ports of both servers."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        write_float32(model)
        with server("mlx_lm", model) as stock, server("paged", model) as paged:
            yield load_tokenizer(model), {"mlx_lm": stock, "paged": paged}


def write_float32(folder: Path, source: Path | None = None) -> None:
    """A copy of the bench's model, or of another one, whose weights have 32 bits: mlx_lm.server has
    no option for that."""
    source = source or model_folder(MODEL)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights: Any = mx.load(str(source / "model.safetensors"))
    wide = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})


def figures_of(loads: dict[str, Load]) -> dict[str, Any]:
    """What is told of both servers."""
    texts = [[answer.text for answer in load.answers] for load in loads.values()]
    return {
        "requests": len(texts[0]),
        "equal_texts": sum(theirs == ours for theirs, ours in zip(*texts, strict=True)),
        **{name: _figures_of_one(load) for name, load in loads.items()},
    }


def _figures_of_one(load: Load) -> dict[str, Any]:
    answers = load.answers
    per_token = [
        (each.last - each.first) / (each.tokens - 1) for each in answers if each.tokens > 1
    ]
    return {
        "tokens_per_second": sum(each.tokens for each in answers) / sum(load.seconds),
        "wall_seconds_of_runs": load.seconds,
        "first_token_seconds": percentiles([each.first for each in answers]),
        "per_token_seconds": percentiles(per_token),
        "whole_seconds": percentiles([each.whole for each in answers]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of which a half, 95 and 99 of 100 are not larger."""
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": median(values), "p95": cuts[94], "p99": cuts[98]}


def serving_http() -> dict[str, Any]:
    loads = {name: Load() for name in COMMANDS}
    with both_servers() as (tokenizer, ports):
        for repetition in range(REPETITIONS):
            requests = make_requests(tokenizer, repetition)
            for name, port in ports.items():
                run(port, requests, loads[name], CLIENTS)
    return {
        "blas": BLAS,
        "clients": CLIENTS,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "seed": SEED,
        **figures_of(loads),
    }


def serving_shared() -> dict[str, Any]:
    loads = {wave: {name: Load() for name in COMMANDS} for wave in WAVES}
    with both_servers() as (tokenizer, ports):
        for repetition in range(SHARING_REPETITIONS):
            for name, port in ports.items():
                for wave, of_servers in loads.items():
                    requests = make_sharing_requests(tokenizer, repetition, wave)
                    run(port, requests, of_servers[name], SHARING_CLIENTS)
    return {
        "runs": SHARING_REPETITIONS,
        "clients": SHARING_CLIENTS,
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "new_tokens": SHARING_NEW_TOKENS,
        **{wave: figures_of(of_servers) for wave, of_servers in loads.items()},
    }


BENCHES: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each for each in (serving_http, serving_shared)
}


def main() -> None:
    for name in sys.argv[1:] or BENCHES:
        write_result(name, {"model": MODEL, "dtype": "float32", **BENCHES[name]()})


if __name__ == "__main__":
    main()
