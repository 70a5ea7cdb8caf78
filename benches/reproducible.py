"""Counts bits that depend on company, and measures what `reproducible` costs:
python -m benches.reproducible --schedules 2000

Small random models of five kinds answer prompts in random schedules (`tests/support/schedules.py`):
with any company, from memory and a store, with preemptions, restarts and aborted neighbours. Each
case has an equal share of them. Without the option every tenth of the same schedules is run.

    differing       generated tokens that are others than those of the same request alone with
                    nothing cached, or whose log-probabilities differ in any bit
    tokens_s        tokens a second of the embedded model in float32 while all clients are answered
    first_token_s   seconds until the first of them gets a token, all prompts being new
    ratios          of two runs one after the other; the median of all repetitions
"""

from benches.openblas import BLAS

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from mlx_lm.generate import BatchGenerator

from benches.models import load_model, source_tokens
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from tests.support.schedules import CASES, Outcome, Schedules

MODEL = "stdlib-llama"
CLIENTS = (1, 4, 8, 16)
PROMPT_TOKENS = 400
ANSWER_TOKENS = 64
REPETITIONS = 3
POOL_BYTES = 256 << 20
SIDES = {"default": False, "reproducible": True}

Speeds = dict[str, float]


def count_bits(schedules: int) -> Iterator[dict[str, Any]]:
    """What the schedules of each case come to on both sides."""
    for at, (kind, dtype, page_format) in enumerate(CASES[:schedules]):
        seeds = range(at, schedules, len(CASES))
        row: dict[str, Any] = {
            "model": kind,
            "dtype": str(dtype).removeprefix("mlx.core."),
            "page_format": page_format,
            "schedules": len(seeds),
        }
        for side, reproducible in SIDES.items():
            with TemporaryDirectory() as folder:
                runs = Schedules(kind, dtype, page_format, Path(folder), reproducible=reproducible)
                every = seeds if reproducible else seeds[::10]
                row[side] = sum(map(runs.run, every), Outcome())._asdict()
        print(row, flush=True)
        yield row


def answered(model: Any, prompts: list[list[int]], *, reproducible: bool) -> Speeds:
    """The speed of answers to some clients, whose prompts come at once."""
    factory = PagedCacheFactory(model, max_bytes=POOL_BYTES, reproducible=reproducible)
    with factory:
        generator = BatchGenerator(model, completion_batch_size=len(prompts))
        generator.insert(prompts, [ANSWER_TOKENS] * len(prompts))
        began = perf_counter()
        # When each step of all clients ended.
        all_answered: list[float] = []
        first_s = 0.0
        while responses := generator.next_generated():
            first_s = first_s or perf_counter() - began
            if len(responses) == len(prompts):
                all_answered.append(perf_counter())
        generator.close()
    factory.close()
    steps, seconds = len(all_answered) - 1, all_answered[-1] - all_answered[0]
    return {"tokens_s": steps * len(prompts) / seconds, "first_token_s": first_s}


def measure_cost() -> Iterator[dict[str, Any]]:
    """Both sides in turns, for each number of clients."""
    model, tokenizer = load_model(MODEL)
    texts = random.Random(0)
    prompts = [
        source_tokens(texts, tokenizer, 10 * PROMPT_TOKENS)[:PROMPT_TOKENS]
        for _ in range(max(CLIENTS))
    ]
    for reproducible in SIDES.values():  # The trial of the device is over then.
        answered(model, prompts[:1], reproducible=reproducible)
    for clients in CLIENTS:
        runs: dict[str, list[Speeds]] = defaultdict(list)
        for _ in range(REPETITIONS):
            for side, reproducible in SIDES.items():
                runs[side].append(answered(model, prompts[:clients], reproducible=reproducible))
        row: dict[str, Any] = {"clients": clients}
        for name in ("tokens_s", "first_token_s"):
            pairs = zip(runs["default"], runs["reproducible"], strict=True)
            row |= {
                f"{side}_{name}": median(run[name] for run in its) for side, its in runs.items()
            }
            row[f"{name}_ratio"] = median(ours[name] / theirs[name] for theirs, ours in pairs)
        print(row, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=2000, help="on each side, of all cases")
    schedules = parser.parse_args().schedules
    figures = {
        "model": MODEL,
        "dtype": "float32",
        "blas": BLAS,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "cost": list(measure_cost()),
        "cases": list(count_bits(schedules)),
    }
    write_result("reproducible", figures)


if __name__ == "__main__":
    main()
