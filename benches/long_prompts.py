"""Sends a server a long prompt while others read their answers: python -m benches.long_prompts

8 clients stream answers of `paged-kv server`. Another one asks for 2 tokens behind a prompt nearly
as long as the context, and while that is computed, one more behind 50 tokens. One server has
`--decode-share 0`: between two tokens of an answer it computes up to 2,048 of the prompt. The other
one has its defaults. Both run on loopback, in float32, and take turns; each figure is the median of
their runs.

    kept               an answer's tokens a second while the prompt is computed, over those before
    longest gap        between two tokens of an answer meanwhile; in steps, which are the time
                       between two tokens before
    first token        of the long prompt, over what it takes while nobody else asks; of the short
                       one, in seconds and in tokens that an answer has got meanwhile
    tokens a second    of prompts and answers, from when the long prompt is sent until it has its
                       first token and every answer 400 more
"""

from benches.openblas import BLAS

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Any

from benches.results_file import write_result
from benches.serving_http import MODEL, events, server, write_float32

# isort: split
from mlx_lm.utils import load_tokenizer

from benches.models import MODELS, source_tokens

STREAMS, ANSWER_TOKENS, SHORT_TOKENS, MORE_TOKENS = 8, 3_000, 50, 400
# Tokens of an answer before the prompt is sent, of which the last ones say how long a step is.
QUIET_TOKENS, COUNTED_TOKENS = 100, 80
SMALL_MODEL = "stdlib-llama"
# Tokens of the prompt, and runs.
LOADS = {SMALL_MODEL: (4_000, 3), MODEL: (8_000, 1)}
SHARES = {"no_share": "0", "default": "0.5"}


def times_of(port: int, prompt: list[int], most: int, ended: threading.Event) -> Iterator[float]:
    """When each token of an answer comes."""
    body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
    # The end token is as good as any other.
    for _ in events(port, {**body, "ignore_eos": True}):
        yield perf_counter()
        if ended.is_set():
            return


class Answers:
    """Answers that other threads read, and when their tokens came."""

    def __init__(self, port: int, prompts: list[list[int]]) -> None:
        self.times: list[list[float]] = [[] for _ in prompts]
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(port, prompt, times))
            for prompt, times in zip(prompts, self.times, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, port: int, prompt: list[int], times: list[float]) -> None:
        times.extend(times_of(port, prompt, ANSWER_TOKENS, self._ended))

    def wait_for(self, count: int) -> None:
        while min(map(len, self.times)) < count:
            sleep(0.005)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def first_token(port: int, prompt: list[int]) -> tuple[float, float]:
    """When a prompt is sent, and when its first token comes."""
    sent = perf_counter()
    first, *_ = times_of(port, prompt, 2, threading.Event())
    return sent, first


def measure(port: int, tokenizer: Any, count: int, rng: Random) -> dict[str, float]:
    """One run: a prompt of so many tokens alone, and another one beside the answers."""

    def tokens(length: int) -> list[int]:
        characters = 6 * length
        found = source_tokens(rng, tokenizer, characters, least=characters + 5_000)[:length]
        assert len(found) == length, "there are too few characters for so many tokens"
        return found

    sent, came = first_token(port, tokens(count))
    alone_s = came - sent
    answers = Answers(port, [tokens(40) for _ in range(STREAMS)])
    answers.wait_for(QUIET_TOKENS)
    counted = [times[QUIET_TOKENS - COUNTED_TOKENS : QUIET_TOKENS] for times in answers.times]
    steps_s = [(times[-1] - times[0]) / (len(times) - 1) for times in counted]
    short, short_prompt = [], tokens(SHORT_TOKENS)

    def ask_short() -> None:
        sleep(alone_s / 4)
        short.append(first_token(port, short_prompt))

    other = threading.Thread(target=ask_short)
    other.start()
    sent, came = first_token(port, tokens(count))
    other.join()
    known = [sum(each < sent for each in times) for times in answers.times]
    answers.wait_for(max(known) + MORE_TOKENS)
    answers.end()
    last = [times[at + MORE_TOKENS - 1] for times, at in zip(answers.times, known, strict=True)]
    ((short_sent, short_came),) = short
    step_s = median(steps_s)

    def between(begin: float, end: float) -> list[list[float]]:
        return [[each for each in times if begin <= each <= end] for times in answers.times]

    inside = between(sent, came)
    gap_s = max(
        later - earlier
        for times in answers.times
        for earlier, later in pairwise(times)
        if earlier <= came and later >= sent
    )
    return {
        "step_seconds": step_s,
        "kept": median(
            len(times) * each / (came - sent) for times, each in zip(inside, steps_s, strict=True)
        ),
        "longest_gap_seconds": gap_s,
        "longest_gap_steps": gap_s / step_s,
        "alone_seconds": alone_s,
        "first_token_seconds": came - sent,
        "first_token_ratio": (came - sent) / alone_s,
        "short_first_token_seconds": short_came - short_sent,
        "short_first_token_tokens": median(map(len, between(short_sent, short_came))),
        "tokens_per_second": (count + SHORT_TOKENS + MORE_TOKENS * STREAMS)
        / (max(came, short_came, *last) - sent),
    }


def measure_model(model: Path, count: int, runs: int) -> dict[str, Any]:
    """All runs of a model."""
    tokenizer, rng = load_tokenizer(model), Random(0)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SHARES}
    with ExitStack() as servers:
        ports = {
            side: servers.enter_context(server("paged", model, "--decode-share", share))
            for side, share in SHARES.items()
        }
        for _ in range(runs):
            for side, port in ports.items():
                found[side].append(measure(port, tokenizer, count, rng))
                print(side, found[side][-1], flush=True)
    return {
        side: {name: median(run[name] for run in each) for name in each[0]}
        for side, each in found.items()
    }


def main() -> None:
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (count, runs) in LOADS.items():
            model = Path(folder, name)
            write_float32(model, Path(MODELS[name]) if name in MODELS else None)
            models[name] = {"tokens": count, "runs": runs, **measure_model(model, count, runs)}
    figures = {"dtype": "float32", "blas": BLAS, "streams": STREAMS, "models": models}
    write_result("long_prompts", {**figures, "short_tokens": SHORT_TOKENS})


if __name__ == "__main__":
    main()
