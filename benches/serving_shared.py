"""Loads servers with clients behind one prompt: python -m benches.serving_shared [PYTHON]

As in benches.serving_http, but all clients ask at once, each a prompt of 2,048 tokens that all have
in common and 32 of its own, and 64 new tokens, greedy. The common part of each run is new to the
servers. The sides take turns: `mlx_lm.server`, `paged-kv server`, and with PYTHON, the interpreter
of another environment, the server that is installed there ("before").

    tokens a second    generated tokens over the time from the first request to the last answer; all
                       runs together
    first token        from sending the request to the first text of its answer
"""

import json
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from benches.serving_http import (
    MODEL,
    SEED,
    SOURCES,
    Load,
    Request,
    answered,
    figures_of,
    server,
    write_float32,
)

# isort: split
from mlx_lm.utils import load_tokenizer

from benches.results_file import write_result

CLIENTS = (16, 32)
REPETITIONS = 3
SHARED_TOKENS, OWN_TOKENS, NEW_TOKENS = 2_048, 32, 64
# Characters of source that hold the shared tokens.
WINDOW = 20_000


def make_requests(tokenizer: Any, clients: int, repetition: int) -> list[Request]:
    """The load of one run."""
    rng = random.Random(f"{SEED} {clients} {repetition}")
    sources = sorted(path for path in SOURCES.glob("*.py") if path.stat().st_size > 60_000)
    text = rng.choice(sources).read_text(encoding="utf-8")
    start = rng.randrange(len(text) - WINDOW)
    tokens = tokenizer.encode(text[start : start + WINDOW])
    shared = tokens[:SHARED_TOKENS]
    assert len(shared) == SHARED_TOKENS
    requests = []
    for _ in range(clients):
        at = rng.randrange(len(tokens) - OWN_TOKENS)
        prompt = tokenizer.decode([*shared, *tokens[at : at + OWN_TOKENS]])
        requests.append(Request(prompt, NEW_TOKENS))
    return requests


def run(port: int, requests: list[Request], load: Load) -> None:
    """All requests of one run at once."""
    began = perf_counter()
    with ThreadPoolExecutor(len(requests)) as clients:
        load.answers += clients.map(lambda request: answered(port, request), requests)
    load.seconds.append(perf_counter() - began)


def main() -> None:
    pythons = {"mlx_lm": sys.executable, "paged": sys.executable}
    if len(sys.argv) > 1:
        pythons["before"] = sys.argv[1]
    figures: dict[str, Any] = {
        "model": MODEL.name,
        "dtype": "float32",
        "runs": REPETITIONS,
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "new_tokens": NEW_TOKENS,
        "sides": list(pythons),
    }
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        model = Path(name)
        write_float32(model)
        tokenizer = load_tokenizer(model)
        # Each side may run as many requests at once as there are clients.
        more = ("--decode-concurrency", str(max(CLIENTS)))
        ports = {}
        for side, python in pythons.items():
            command = "mlx_lm" if side == "mlx_lm" else "paged"
            ports[side] = servers.enter_context(server(command, model, *more, python=python))
        for clients in CLIENTS:
            loads = {side: Load() for side in pythons}
            for repetition in range(REPETITIONS):
                requests = make_requests(tokenizer, clients, repetition)
                for side, port in ports.items():
                    run(port, requests, loads[side])
                    print(f"{clients}, {side}: {loads[side].seconds[-1]:.1f} s", file=sys.stderr)
            first = loads["paged"].answers
            figures[f"{clients}_clients"] = {
                side: figures_of(load)
                | {
                    "equal_texts": sum(
                        ours.text == theirs.text
                        for ours, theirs in zip(first, load.answers, strict=True)
                    )
                }
                for side, load in loads.items()
            }
    print(json.dumps(figures, indent=2))
    print("written to", write_result("serving_shared", figures).name)


if __name__ == "__main__":
    main()
