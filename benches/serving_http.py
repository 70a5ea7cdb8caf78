"""Loads `mlx_lm.server` and `paged-kv server` over HTTP: python -m benches.serving_http

Each is a process of its own, on SmolLM2 in float32 and on loopback. 16 clients, threads
of this process, ask for streams of text. A client with its answer sends the next request of a list
drawn from one seed: prompts of 64 to 1,000 tokens of Python's standard library, and 16 to 96 new
tokens, greedy. The prompts of each run are new to the server: runs differ in where texts begin.

Both servers take turns, and figures are of all requests of all runs together.

    tokens a second    generated tokens over the time from the first request to the last answer
    first token        from sending the request to the first text of its answer
    per token          from the first text to the last, over the tokens between them
    whole answer       from sending the request to the end of its answer
"""

import http.client
import inspect
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm.utils import load_tokenizer

from benches.real_models.folders import model_folder
from benches.results_file import write_result

ROOT = Path(__file__).parents[1]
SEED = 0
CLIENTS = 16
REQUESTS = 32
REPETITIONS = 1
PROMPT_TOKENS = (64, 1_000)
NEW_TOKENS = (16, 96)
# Characters of source that hold the longest prompt.
WINDOW = 6_000
MODEL = "smollm2"
SOURCES = Path(inspect.getfile(json)).parents[1]
# mlx-lm's does not load OpenBLAS by itself.
_STOCK = "import benches.openblas, mlx_lm.server; mlx_lm.server.main()"
COMMANDS = {
    "mlx_lm": ["-c", _STOCK],
    "paged": ["-m", "paged_kv", "server", "--max-kv-bytes", "2GB"],
}
START_S = 300


@dataclass(frozen=True)
class Request:
    """What a client sends."""

    prompt: str
    max_tokens: int


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
    sources = sorted(path for path in SOURCES.glob("*.py") if path.stat().st_size > 30_000)
    requests = []
    for _ in range(REQUESTS):
        text = rng.choice(sources).read_text(encoding="utf-8")
        start = rng.randrange(len(text) - WINDOW)
        tokens = tokenizer.encode(text[start : start + WINDOW])[: rng.randint(*PROMPT_TOKENS)]
        requests.append(Request(tokenizer.decode(tokens), rng.randint(*NEW_TOKENS)))
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


def ask(port: int, request: Request) -> Answer:
    """One request, streamed."""
    body = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, began = Answer(), perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        said, now = json.loads(line.removeprefix(b"data: ")), perf_counter() - began
        if said.get("usage"):
            answer.tokens = said["usage"]["completion_tokens"]
        elif text := said["choices"][0]["text"]:
            answer.text += text
            answer.first = answer.first or now
            answer.last = now
    answer.whole = perf_counter() - began
    connection.close()
    return answer


def run(port: int, requests: Sequence[Request], load: Load, at_once: int) -> None:
    """All requests of one run, of so many clients at once."""
    began = perf_counter()
    with ThreadPoolExecutor(at_once) as clients:
        load.answers += clients.map(lambda request: answered(port, request), requests)
    load.seconds.append(perf_counter() - began)


@contextmanager
def server(name: str, model: Path, *more: str) -> Iterator[int]:
    """A server in a process of its own, once it answers; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", str(model), "--port", str(port), "--log-level", "ERROR", *more]
    # mlx-lm's logs every request.
    process = subprocess.Popen(
        [sys.executable, *COMMANDS[name], *options], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        deadline = perf_counter() + START_S
        while not _answers(port):
            assert perf_counter() < deadline, f"{name} does not answer"
            assert process.poll() is None, f"{name} has ended"
            sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        ask(port, Request("import", 1))
    except OSError:
        return False
    return True


def figures_of(load: Load) -> dict[str, Any]:
    """What is told of one server."""
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


def write_float32(folder: Path, source: Path | None = None) -> None:
    """A copy of a model whose weights have 32 bits: mlx_lm.server has no option for that."""
    source = source or model_folder(MODEL)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights: Any = mx.load(str(source / "model.safetensors"))
    wide = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})


def main() -> None:
    loads = {name: Load() for name in COMMANDS}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        write_float32(model)
        tokenizer = load_tokenizer(model)
        with server("mlx_lm", model) as stock, server("paged", model) as paged:
            for repetition in range(REPETITIONS):
                requests = make_requests(tokenizer, repetition)
                for each, port in (("mlx_lm", stock), ("paged", paged)):
                    run(port, requests, loads[each], CLIENTS)
                    print(f"{each}: {loads[each].seconds[-1]:.1f} s", file=sys.stderr)
    texts = [[answer.text for answer in load.answers] for load in loads.values()]
    figures = {
        "model": MODEL,
        "dtype": "float32",
        "blas": BLAS,
        "clients": CLIENTS,
        "requests": REQUESTS * REPETITIONS,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "seed": SEED,
        "equal_texts": sum(theirs == ours for theirs, ours in zip(*texts, strict=True)),
        **{name: figures_of(load) for name, load in loads.items()},
    }
    print(json.dumps(figures, indent=2))
    print("written to", write_result("serving_http", figures).name)


if __name__ == "__main__":
    main()
