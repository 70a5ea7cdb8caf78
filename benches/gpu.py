"""A whole model on a GPU, on mlx-lm's caches and on pages: python -m benches.gpu [PART ...]

It runs the checks of `paged-kv doctor`, each kind of pages in a process of its own. Then the
trained models of this project continue prompts greedily in 16 bits, on both: it counts
the prompts that differ, and the largest gap between the two best logits where one does. Last a
random model of the shape of Llama 3 8B, in bfloat16, takes steps in turns: decode for one and
eight sequences, behind caches that hold random numbers, and a prompt of 8,192 tokens.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from benches.models import MODELS, filled, load_model
from benches.results_file import latest_figures, write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.kernels.backends import device_backend
from paged_kv.kernels.pages import self_test
from paged_kv.kernels.pages.number_format import KEY_FORMATS
from paged_kv.kernels.pages.self_test import TOLERANCES

PROMPTS, NEW_TOKENS = 6, 40
LAYERS, STEPS, REPETITIONS = 32, 8, 4
POOL = 24 << 30
CONTEXTS = {1: (1024, 8192, 32768), 8: (1024, 8192)}


def equality() -> Iterator[dict[str, Any]]:
    for name in MODELS:
        for dtype in (mx.float16, mx.bfloat16):
            model, tokenizer = load_model(name, dtype)
            tokens = tokenizer.encode(Path(__file__).read_text() * 4)
            factory = PagedCacheFactory(model, max_bytes=1 << 30)
            differ, gaps = 0, []
            for number in range(PROMPTS):
                prompt = mx.array(tokens[number * 7 : number * 7 + 60 + 130 * number])
                ours = greedy(model, prompt, factory.make_cache())
                theirs = greedy(model, prompt, make_prompt_cache(model))
                for (mine, _), (its, gap) in zip(ours, theirs, strict=True):
                    if mine != its:
                        differ += 1
                        gaps.append(gap)
                        break
            yield {
                "model": name,
                "dtype": str(dtype),
                "backend": factory.stats().backend,
                "prompts": PROMPTS,
                "differ": differ,
                "gaps": [round(each, 4) for each in gaps],
            }


def greedy(model: Any, prompt: mx.array, cache: Any) -> list[tuple[int, float]]:
    """The tokens, and the gap between the two best log-probabilities of each."""
    found = []
    for token, logits in generate_step(prompt, model, max_tokens=NEW_TOKENS, prompt_cache=cache):
        best = mx.sort(logits.astype(mx.float32))[-2:]
        found.append((int(token), float(best[1] - best[0])))
    return found


@lru_cache
def llama_8b() -> Any:
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=4096,
            num_hidden_layers=LAYERS,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            vocab_size=32000,
            rope_theta=500000.0,
        )
    )
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def decode() -> Iterator[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "fp16": {"compile": False},
        "fp16 compiled": {"compile": True},
        "q4": {"compile": False, "page_format": "q4"},
    }
    model = llama_8b()
    for batch, contexts in CONTEXTS.items():
        for context in contexts:
            stock = Steps(model, make_prompt_cache(model), batch, context)
            for name, options in kinds.items():
                factory = PagedCacheFactory(model, max_bytes=POOL, **options)
                paged = Steps(model, factory.make_cache(), batch, context)
                # Steps that are recorded are compared with Python's at first.
                paged()
                paged()
                theirs, ours = in_turns(stock, paged, repetitions=REPETITIONS)
                yield {
                    "batch": batch,
                    "context": context,
                    "pages": name,
                    "mlx_lm_ms": 1e3 * median(theirs) / STEPS,
                    "paged_ms": 1e3 * median(ours) / STEPS,
                    "times_as_fast": ratio(theirs, ours),
                    "mlx_lm_host_ms": 1e3 * median(stock.host) / STEPS,
                    "paged_host_ms": 1e3 * median(paged.host) / STEPS,
                }
                del paged, factory
            del stock
            mx.clear_cache()


class Steps:
    """Takes some steps; each is queued while the one before computes, as mlx-lm does it."""

    def __init__(self, model: Any, caches: Any, batch: int, context: int) -> None:
        self._model, self._caches = model, filled(model, caches, batch, context)
        self._tokens = mx.ones((batch, 1), dtype=mx.int32)
        self.host: list[float] = []  # seconds of a call until the last step is queued

    def __call__(self) -> None:
        began = time.perf_counter()
        for _ in range(STEPS):
            logits = self._model(self._tokens, cache=self._caches)
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        self.host.append(time.perf_counter() - began)
        mx.eval(logits)


def prefill() -> Iterator[dict[str, Any]]:
    model, tokens = llama_8b(), mx.random.randint(0, 32000, (1, 8192))

    def run(make: Callable[[], Any]) -> Callable[[], None]:
        def work() -> None:
            caches = make()
            for first in range(0, tokens.shape[1], 2048):
                mx.eval(model(tokens[:, first : first + 2048], cache=caches))

        return work

    factory = PagedCacheFactory(model, max_bytes=POOL)
    works = run(lambda: make_prompt_cache(model)), run(factory.make_cache)
    stock, paged = in_turns(*works, repetitions=3)
    yield {
        "prompt": tokens.shape[1],
        "mlx_lm_s": median(stock),
        "paged_s": median(paged),
        "times_as_fast": ratio(stock, paged),
    }


def checks() -> Iterator[dict[str, Any]]:
    """Those of `paged-kv doctor`. Compiling takes the time, so each kind of pages has a process."""
    kinds = [(str(dtype), name) for dtype in TOLERANCES for name in KEY_FORMATS]
    with ProcessPoolExecutor(len(kinds), multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(checks_of, *zip(*kinds, strict=True)):
            yield from found


def checks_of(dtype: str, page_format: str) -> list[dict[str, Any]]:
    ending = f" {page_format} {dtype.rpartition('.')[2]}"
    every = self_test.checks(device_backend())
    return [finding(check) for check in every if check.name.endswith(ending)]


def finding(check: self_test.Check) -> dict[str, Any]:
    error = float(check.run())
    passed = error <= check.tolerance
    return {"check": check.name, "error": error, "at_most": check.tolerance, "passed": passed}


PARTS = {"checks": checks, "equality": equality, "decode": decode, "prefill": prefill}


def main() -> None:
    mx.random.seed(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    rows = latest_figures("gpu")
    for name in parser.parse_args().parts or PARTS:
        rows[name] = []
        for row in PARTS[name]():
            rows[name].append(row)
            print(name, row, flush=True)
        write_result("gpu", rows)


if __name__ == "__main__":
    main()
