"""Compares optimistic admission with reserving all that a request may need:
python -m benches.admission

The embedded model in float32 serves 200 requests in a pool of 16 MB. Their arrivals, prompts, and
how many tokens they generate before they end by themselves are drawn from one seed.

Each request allows `max_tokens`, which is 1,900 or 512. In a third load the first requests really
generate 512 tokens. Both policies serve the same requests in turns in one process.

    running            sequences that hold pages, the mean over all steps and the most
    tokens a second    generated tokens over the time of the whole run
    ratios             of two runs one after the other; the median of all repetitions
    wrong              requests whose tokens differ between the two policies, where the best two
                       logits of the model differ by more than 0.002
"""

from benches.openblas import BLAS

import gc
import random
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import mean, median
from time import perf_counter
from typing import Any

from mlx_lm.generate import BatchGenerator

from benches.models import first_difference, load_model, source_tokens
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.preemption import attach

MODEL = "stdlib-llama"
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


@dataclass(frozen=True)
class Request:
    """A request, and the step at which it arrives."""

    number: int
    arrives: int
    prompt: list[int]
    answer: int
    max_tokens: int


@dataclass
class Served:
    """One run of a load: the sequences that ran in each step, the tokens by request, and what the
    results file holds."""

    running: list[int] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


def make_requests(tokenizer: Any, max_tokens: int) -> list[Request]:
    """The load, with prompts from Python's standard library."""
    numbers, texts = random.Random(SEED), random.Random(SEED)
    requests, arrives = [], 0.0
    for number in range(REQUESTS):
        count, answer = numbers.randint(*PROMPT_TOKENS), numbers.randint(*ANSWER_TOKENS)
        prompt = source_tokens(texts, tokenizer, 3_000)[:count]
        requests.append(Request(number, round(arrives), prompt, answer, max_tokens))
        arrives += numbers.expovariate(1 / MEAN_STEPS_BETWEEN_ARRIVALS)
    return requests


def serve(model: Any, requests: list[Request], policy: str) -> Served:
    """One run of a load under one policy."""
    factory = PagedCacheFactory(model, max_bytes=POOL_BYTES)
    generator = BatchGenerator(model, completion_batch_size=PLACES)
    attach(generator, factory).reserve_share = float(policy == "reserve")
    arriving, by_uid, served = deque(requests), dict[int, Request](), Served()
    began = perf_counter()
    with factory:
        while arriving or by_uid:
            while arriving and arriving[0].arrives <= len(served.running):
                request = arriving.popleft()
                (uid,) = generator.insert([request.prompt], [request.max_tokens])
                by_uid[uid], served.texts[request.number] = request, []
            for response in generator.next()[1]:
                request = by_uid[response.uid]
                text = served.texts[request.number]
                text.append(response.token)
                response.prompt_cache = None
                if len(text) == request.answer:
                    # A text that ends by itself, as at a model's end token.
                    generator.remove([response.uid])
                    del by_uid[response.uid]
            served.running.append(len(generator._generation_batch) + len(generator._prompt_batch))
    seconds = perf_counter() - began
    generator.close()
    gc.collect()
    stats = factory.stats()
    factory.close()
    served.figures = {
        "seconds": seconds,
        "steps": len(served.running),
        "tokens_per_second": sum(map(len, served.texts.values())) / seconds,
        "running_mean": mean(served.running),
        "running_most": max(served.running),
        "preemptions": stats.preemptions,
        "tokens_recomputed": stats.tokens_recomputed,
        "requests_finished": len(served.texts),
        "blocks_left": stats.blocks_used,
    }
    return served


def wrong(model: Any, requests: list[Request], one: Served, other: Served) -> int:
    """How many requests got different tokens, other than after a tie."""
    found = [
        first_difference(model, each.prompt, one.texts[each.number], other.texts[each.number])
        for each in requests
    ]
    return sum(each is not None and each["gap"] > TIE for each in found)


def compare(model: Any, requests: list[Request]) -> dict[str, Any]:
    """Both policies in turns."""
    runs: dict[str, list[Served]] = {"reserve": [], "optimistic": []}
    for _ in range(REPETITIONS):
        for name, its in runs.items():
            its.append(serve(model, requests, name))
            print(name, its[-1].figures, flush=True)
    pairs = list(zip(runs["reserve"], runs["optimistic"], strict=True))

    def ratio(name: str) -> float:
        return float(median(b.figures[name] / a.figures[name] for a, b in pairs))

    return {
        **{name: [run.figures for run in its] for name, its in runs.items()},
        "running_ratio": ratio("running_mean"),
        "speed_ratio": ratio("tokens_per_second"),
        "requests": len(requests),
        "requests_wrong": sum(wrong(model, requests, a, b) for a, b in pairs),
    }


def main() -> None:
    model, tokenizer = load_model(MODEL)
    short = {str(most): compare(model, make_requests(tokenizer, most)) for most in (1_900, 512)}
    long = [
        replace(request, answer=LONG_ANSWER)
        for request in make_requests(tokenizer, LONG_ANSWER)[:LONG_REQUESTS]
    ]
    figures = {
        "model": MODEL,
        "dtype": "float32",
        "blas": BLAS,
        "pool_bytes": POOL_BYTES,
        "places": PLACES,
        "short_answers": short,
        "answers_of_max_tokens": compare(model, long),
    }
    write_result("admission", figures)


if __name__ == "__main__":
    main()
