"""Runs a server's load through mlx-lm's BatchGenerator, on its caches and on pages:
python -m benches.serving

The embedded model in float32 serves 32 requests. Their prompts are 64 to 2,000 tokens of Python's
standard library, each is given 16 to 256 new tokens, greedy, and they arrive at random steps of the
generator: all drawn from one seed, and the same for both caches. A step is one call of next().

Both caches take turns in one process, and each figure is the median of its repetitions.

    prompt and generation speeds   as BatchGenerator.stats() counts them. Lazy work counts where it
                                   is waited for, so only the wall time is exact.
    peak KV bytes                  the most after any step. mlx-lm: nbytes of all batches, which is
                                   BatchGenerator.prompt_cache_nbytes. Pages: bytes of the pages in
                                   use, and of all that is mapped.
    tokens held                    the most after any step: prompts that were read and what was
                                   generated, of the requests that were not finished. One token is
                                   `token_bytes`.
    peak memory                    of everything MLX holds, weights and what models compute included

For a request whose tokens differ, the bench reports the gap between the best two logits of mlx-lm's
own run over the same text, at the first differing token: it says whether that was a tie.
"""

from benches.openblas import BLAS

import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from benches.models import first_difference, load_model, source_tokens
from benches.results_file import write_result
from paged_kv import PagedCacheFactory

SEED = 0
REQUESTS = 32
PROMPT_TOKENS = (64, 2_000)
NEW_TOKENS = (16, 256)
# Characters of source that hold the longest prompt.
WINDOW = 12_000
MEAN_STEPS_BETWEEN_ARRIVALS = 8
REPETITIONS = 3
# Holds all requests at once and at their longest.
POOL_BYTES = 512 << 20
MODEL = "stdlib-llama"


@dataclass(frozen=True)
class Request:
    """What a client sends, and before which step it comes."""

    prompt: list[int]
    max_tokens: int
    arrives: int


# What a run generated, by request; and its figures.
Texts = list[list[int]]
Served = dict[str, Any]


def make_requests(tokenizer: Any) -> list[Request]:
    """The load, in the order of arrival."""
    rng = random.Random(SEED)
    requests, arrives = [], 0.0
    for _ in range(REQUESTS):
        prompt = source_tokens(rng, tokenizer, WINDOW)[: rng.randint(*PROMPT_TOKENS)]
        requests.append(Request(prompt, rng.randint(*NEW_TOKENS), round(arrives)))
        arrives += rng.expovariate(1 / MEAN_STEPS_BETWEEN_ARRIVALS)
    return requests


def serve(
    model: Any,
    requests: list[Request],
    make_cache: Callable[[], list[Any]],
    kv_bytes: Callable[[BatchGenerator], dict[str, int]],
) -> tuple[Served, Texts]:
    """Serve the load once."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    texts = [list[int]() for _ in requests]
    generator, held, kv = BatchGenerator(model), list[list[int]](), list[dict[str, int]]()
    with generator.stats() as stats:
        for tokens in _steps(generator, requests, make_cache, texts):
            held.append(tokens)
            kv.append(kv_bytes(generator))
    tokens_in_all = sum(len(request.prompt) for request in requests) + sum(map(len, texts))
    figures = {
        "prompt_tokens_per_second": stats.prompt_tps,
        "generation_tokens_per_second": stats.generation_tps,
        "all_tokens_per_second": tokens_in_all / stats.wall_time,
        "wall_seconds": stats.wall_time,
        "steps": len(held),
        "peak_rows": max(map(len, held)),
        "peak_tokens_held": max(map(sum, held)),
        "peak_memory_bytes": mx.get_peak_memory(),
        "peak_kv_bytes": {name: max(each[name] for each in kv) for name in kv[0]},
    }
    return figures, texts


def _steps(
    generator: BatchGenerator,
    requests: list[Request],
    make_cache: Callable[[], list[Any]],
    texts: Texts,
) -> Iterator[list[int]]:
    """Let requests arrive and the generator step; yields the tokens that each unfinished request
    holds in its cache, and fills `texts`."""
    waiting, read, finished = deque(enumerate(requests)), dict[int, int](), 0
    step = 0
    while finished < len(requests):
        while waiting and waiting[0][1].arrives <= step:
            number, request = waiting.popleft()
            uids = generator.insert([request.prompt], [request.max_tokens], caches=[make_cache()])
            assert uids == [number]
        prompts, tokens = generator.next()
        for progress in prompts:
            read[progress.uid] = progress.progress[0]
        for response in tokens:
            texts[response.uid].append(response.token)
            if response.finish_reason:
                finished += 1
                read.pop(response.uid)
        yield [count + len(texts[uid]) for uid, count in read.items()]
        step += 1


def medians(runs: list[Served]) -> dict[str, Any]:
    """The median of each figure."""
    peaks = [run.pop("peak_kv_bytes") for run in runs]
    return {
        **{name: median(run[name] for run in runs) for name in runs[0]},
        "wall_seconds_of_runs": [run["wall_seconds"] for run in runs],
        "peak_kv_bytes": {name: median(peak[name] for peak in peaks) for name in peaks[0]},
    }


def token_bytes(model: Any) -> int:
    """Keys and values of one token, in all layers."""
    args = model.args
    head = args.head_dim or args.hidden_size // args.num_attention_heads
    return int(args.num_hidden_layers * 2 * args.num_key_value_heads * head * mx.float32.size)


def run_all(model: Any, requests: list[Request]) -> dict[str, Any]:
    """Both caches in turns, and whether their texts are equal."""
    stock_runs, paged_runs, differing = [], [], dict[int, Any]()
    for repetition in range(1, REPETITIONS + 1):
        print(f"run {repetition} of {REPETITIONS}, mlx-lm's caches", file=sys.stderr)
        stock, stock_texts = serve(
            model,
            requests,
            lambda: make_prompt_cache(model),
            lambda generator: {"nbytes": generator.prompt_cache_nbytes},
        )
        print(f"run {repetition} of {REPETITIONS}, pages", file=sys.stderr)
        ours, texts = serve_paged(model, requests)
        for number, request in enumerate(requests):
            told = first_difference(model, request.prompt, stock_texts[number], texts[number])
            differing |= {number: told} if told else {}
        stock_runs.append(stock)
        paged_runs.append(ours)
    return {
        "mlx_lm": medians(stock_runs),
        "paged": medians(paged_runs),
        "requests_with_equal_tokens_in_all_runs": len(requests) - len(differing),
        "first_differences": differing,
    }


def serve_paged(model: Any, requests: list[Request]) -> tuple[Served, Texts]:
    """Serve the load once on a pool of its own."""
    factory = PagedCacheFactory(model, max_bytes=POOL_BYTES)

    def kv_bytes(generator: BatchGenerator) -> dict[str, int]:
        stats = factory.stats()
        return {"active": stats.bytes_active, "mapped": stats.bytes_mapped}

    run, texts = serve(model, requests, factory.make_cache, kv_bytes)
    gc.collect()
    factory.pool.check()
    stats = factory.stats()
    assert stats.blocks_used == 0, "blocks are in use after the last request"
    assert stats.gather_fallbacks == 0, "attention did not read pages"
    return run, texts


def main() -> None:
    model, tokenizer = load_model(MODEL)
    requests = make_requests(tokenizer)
    figures = {
        "model": MODEL,
        "dtype": "float32",
        "blas": BLAS,
        "backend": PagedCacheFactory(model, max_bytes=POOL_BYTES).stats().backend,
        "requests": REQUESTS,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "new_tokens": sum(request.max_tokens for request in requests),
        "mean_steps_between_arrivals": MEAN_STEPS_BETWEEN_ARRIVALS,
        "seed": SEED,
        "repetitions": REPETITIONS,
        "pool_bytes": POOL_BYTES,
        "token_bytes": token_bytes(model),
        "weight_bytes": mx.get_active_memory(),
        **run_all(model, requests),
    }
    write_result("serving", figures)


if __name__ == "__main__":
    main()
