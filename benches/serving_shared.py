"""Loads servers with clients behind one prompt: python -m benches.serving_shared

As in benches.serving_http, but 8 clients ask at once, each a prompt of 1,400 tokens that all have
in common and 32 of its own, and 64 new tokens, greedy. Each run has two waves: the common tokens of
the first are new to the servers, and those of the second are the same, behind them other ones. The
sides take turns: `mlx_lm.server` and `paged-kv server`.

    tokens a second    generated tokens over the time from the first request of a wave to its last
                       answer; all runs together
    first token        from sending the request to the first text of its answer
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.serving_http import (
    MODEL,
    SEED,
    SOURCES,
    Load,
    Request,
    figures_of,
    run,
    server,
    write_float32,
)

# isort: split
from mlx_lm.utils import load_tokenizer

from benches.results_file import write_result

CLIENTS, REPETITIONS, WAVES = 8, 2, ("new", "known")
SHARED_TOKENS, OWN_TOKENS, NEW_TOKENS = 1_400, 32, 64
# Characters of source that hold the shared tokens.
WINDOW = 14_000
SIDES = ("mlx_lm", "paged")


def make_requests(tokenizer: Any, repetition: int, wave: str) -> list[Request]:
    """The load of one wave."""
    rng = random.Random(f"{SEED} {repetition}")
    sources = sorted(path for path in SOURCES.glob("*.py") if path.stat().st_size > 60_000)
    text = rng.choice(sources).read_text(encoding="utf-8")
    start = rng.randrange(len(text) - WINDOW)
    tokens = tokenizer.encode(text[start : start + WINDOW])
    shared = tokens[:SHARED_TOKENS]
    assert len(shared) == SHARED_TOKENS
    own, requests = random.Random(f"{SEED} {repetition} {wave}"), []
    for _ in range(CLIENTS):
        at = own.randrange(len(tokens) - OWN_TOKENS)
        prompt = tokenizer.decode([*shared, *tokens[at : at + OWN_TOKENS]])
        requests.append(Request(prompt, NEW_TOKENS))
    return requests


def main() -> None:
    loads = {wave: {side: Load() for side in SIDES} for wave in WAVES}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        write_float32(model)
        tokenizer = load_tokenizer(model)
        with server("mlx_lm", model) as stock, server("paged", model) as paged:
            for repetition in range(REPETITIONS):
                for side, port in zip(SIDES, (stock, paged), strict=True):
                    for wave, of_sides in loads.items():
                        requests = make_requests(tokenizer, repetition, wave)
                        run(port, requests, of_sides[side], CLIENTS)
                        print(
                            f"{wave}, {side}: {of_sides[side].seconds[-1]:.1f} s", file=sys.stderr
                        )
    figures: dict[str, Any] = {
        "model": MODEL,
        "dtype": "float32",
        "runs": REPETITIONS,
        "clients": CLIENTS,
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "new_tokens": NEW_TOKENS,
    }
    for wave, of_sides in loads.items():
        texts = [[answer.text for answer in load.answers] for load in of_sides.values()]
        figures[wave] = {side: figures_of(load) for side, load in of_sides.items()}
        figures[wave]["requests"] = len(texts[0])
        figures[wave]["equal_texts"] = sum(own == other for own, other in zip(*texts, strict=True))
    print(json.dumps(figures, indent=2))
    print("written to", write_result("serving_shared", figures).name)


if __name__ == "__main__":
    main()
