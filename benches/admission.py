"""Compares optimistic admission with reserving all that a request may need:
python -m benches.admission

The embedded model in float32 serves the requests of benches/loads/short_answers.txt in a pool of
16 MB. A line of that file has the step at which a request arrives, the tokens of its prompt, and
the tokens that it generates before it ends by itself. `python -m benches.admission write` writes
the file again from its seed.

Each request allows `max_tokens`, which is 1,900 or 512. In a third load the first requests of the
file really generate 512 tokens. Both policies serve the same requests in turns in one process.

    running            sequences that hold pages, the mean over all steps and the most
    tokens a second    generated tokens over the time of the whole run
    ratios             of two runs one after the other; the median of all repetitions
    wrong              requests whose tokens differ between the two policies, where the best two
                       logits of the model differ by more than 0.002
"""

import gc
import json
import random
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator

from benches.results_file import write_result
from benches.serving import MODEL, SOURCES
from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.preemption import attach

SEED = 20
REQUESTS = 200
PROMPT_TOKENS = (100, 300)
ANSWER_TOKENS = (16, 104)
MEAN_STEPS_BETWEEN_ARRIVALS = 4
LONG_REQUESTS = 24
LONG_ANSWER = 512
REPETITIONS = 2
POOL_BYTES = 16 << 20
PLACES = 32
# Differences of this size come from the order of sums in batches of different size.
TIE = 2e-3
LOAD = Path(__file__).parent / "loads" / "short_answers.txt"


@dataclass(frozen=True)
class Request:
    """A request, and the step at which it arrives."""

    number: int
    arrives: int
    prompt: tuple[int, ...]
    answer: int
    max_tokens: int


@dataclass
class Served:
    """One run of a load."""

    seconds: float = 0.0
    steps: int = 0
    running: list[int] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    preemptions: int = 0
    tokens_recomputed: int = 0
    blocks_left: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the run."""
        return sum(map(len, self.texts.values())) / self.seconds

    def figures(self) -> dict[str, Any]:
        """The numbers of this run."""
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "tokens_per_second": self.tokens_per_second,
            "running_mean": mean(self.running),
            "running_most": max(self.running),
            "preemptions": self.preemptions,
            "tokens_recomputed": self.tokens_recomputed,
            "requests_finished": len(self.texts),
            "blocks_left": self.blocks_left,
        }


def write_load() -> None:
    """Write the load file."""
    rng, arrives, lines = random.Random(SEED), 0.0, []
    for _ in range(REQUESTS):
        lines.append(
            f"{round(arrives)} {rng.randint(*PROMPT_TOKENS)} {rng.randint(*ANSWER_TOKENS)}\n"
        )
        arrives += rng.expovariate(1 / MEAN_STEPS_BETWEEN_ARRIVALS)
    LOAD.write_text("".join(lines))


def read_load(tokenizer: Any, max_tokens: int) -> list[Request]:
    """The requests of the load file, with prompts from Python's standard library."""
    rng = random.Random(SEED)
    sources = sorted(path for path in SOURCES.glob("*.py") if path.stat().st_size > 30_000)
    requests = []
    for number, line in enumerate(LOAD.read_text().splitlines()):
        arrives, prompt, answer = map(int, line.split())
        text = rng.choice(sources).read_text(encoding="utf-8")
        start = rng.randrange(len(text) - 3_000)
        tokens = tokenizer.encode(text[start : start + 3_000])[:prompt]
        assert len(tokens) == prompt, "the text is too short for the prompt"
        requests.append(Request(number, arrives, tuple(tokens), answer, max_tokens))
    return requests


class Run:
    """One run of a load under one policy."""

    def __init__(self, model: Any, requests: list[Request], policy: str) -> None:
        self._requests = requests
        self._factory = PagedCacheFactory(model, max_bytes=POOL_BYTES)
        self._generator = BatchGenerator(model, completion_batch_size=PLACES)
        preemption = attach(self._generator, self._factory)
        preemption.reserve_share = float(policy == "reserve")
        self._by_uid: dict[int, Request] = {}
        self._served = Served()

    def serve(self) -> Served:
        """Serve all requests."""
        arriving, began = deque(self._requests), perf_counter()
        with self._factory:
            while len(self._served.texts) < len(self._requests) or self._by_uid:
                while arriving and arriving[0].arrives <= self._served.steps:
                    self._arrive(arriving.popleft())
                self._step()
        self._served.seconds = perf_counter() - began
        return self._finished()

    def _arrive(self, request: Request) -> None:
        (uid,) = self._generator.insert([list(request.prompt)], [request.max_tokens])
        self._by_uid[uid] = request
        self._served.texts[request.number] = []

    def _step(self) -> None:
        generator, served = self._generator, self._served
        for response in generator.next()[1]:
            request = self._by_uid[response.uid]
            text = served.texts[request.number]
            text.append(response.token)
            response.prompt_cache = None
            if len(text) == request.answer:
                # A text that ends by itself, as at a model's end token.
                generator.remove([response.uid])
                del self._by_uid[response.uid]
        served.steps += 1
        served.running.append(len(generator._generation_batch) + len(generator._prompt_batch))

    def _finished(self) -> Served:
        self._generator.close()
        gc.collect()
        stats = self._factory.stats()
        self._served.preemptions = stats.preemptions
        self._served.tokens_recomputed = stats.tokens_recomputed
        self._served.blocks_left = stats.blocks_used
        self._factory.close()
        return self._served


def wrong(model: Any, requests: list[Request], one: Served, other: Served) -> int:
    """How many requests got different tokens, other than after a tie."""
    count = 0
    for request in requests:
        ours, theirs = one.texts[request.number], other.texts[request.number]
        pairs = zip(ours, theirs, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            text = [*request.prompt, *ours[:at]]
            best = mx.sort(model(mx.array([text]))[0, -1])[-2:]
            count += float(best[1] - best[0]) > TIE
    return count


def compare(model: Any, requests: list[Request]) -> dict[str, Any]:
    """Both policies in turns."""
    runs: dict[str, list[Served]] = {"reserve": [], "optimistic": []}
    for _ in range(REPETITIONS):
        for name, its in runs.items():
            its.append(Run(model, requests, name).serve())
            print(name, json.dumps(its[-1].figures()), file=sys.stderr)
    pairs = list(zip(runs["reserve"], runs["optimistic"], strict=True))
    return {
        **{name: [run.figures() for run in its] for name, its in runs.items()},
        "running_ratio": median([mean(b.running) / mean(a.running) for a, b in pairs]),
        "speed_ratio": median([b.tokens_per_second / a.tokens_per_second for a, b in pairs]),
        "requests": len(requests),
        "requests_wrong": sum(wrong(model, requests, a, b) for a, b in pairs),
    }


def main() -> None:
    if sys.argv[1:] == ["write"]:
        write_load()
        return
    model, tokenizer, *_ = load(str(MODEL))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    short = {str(most): compare(model, read_load(tokenizer, most)) for most in (1_900, 512)}
    long = [
        replace(request, answer=LONG_ANSWER)
        for request in read_load(tokenizer, LONG_ANSWER)[:LONG_REQUESTS]
    ]
    figures = {
        "model": MODEL.name,
        "dtype": "float32",
        "blas": BLAS,
        "pool_bytes": POOL_BYTES,
        "places": PLACES,
        "short_answers": short,
        "answers_of_max_tokens": compare(model, long),
    }
    print(json.dumps(figures, indent=2))
    print("written to", write_result("admission", figures).name)


if __name__ == "__main__":
    main()
