"""Times decoding with a whole model, on mlx-lm's caches and on pages: python -m benches.whole_model

    stdlib-llama     the trained model in this package, in float32
    smollm2          SmolLM2-135M-Instruct, in float32 and bfloat16

Caches are filled with random keys and values up to the context, the same for both kinds. Steps of
one token for each sequence, which resume there, are timed in turns. Each figure is the median of
its repetitions, and the ratio of speeds the median of the ratios within a turn. The share of
attention is 1 - E/T: T is the time of a step, E that of the same step after an empty cache, taken
in the same turns.

The CPU kernels need the queries, keys and values of a layer when they are called, so each layer
waits once. The script measures what that alone costs: mlx-lm's caches, with such a wait.
"""

from benches.openblas import BLAS

from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from benches.models import Caches, filled, load_model
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.turns import in_turns, ratio, spread


def step(model: Any, caches: Caches, batch: int) -> Callable[[], None]:
    tokens = mx.ones((batch, 1), dtype=mx.int32)

    def run() -> None:
        mx.eval(model(tokens, cache=caches))

    return run


def waiting(run: Callable[[], None]) -> Callable[[], None]:
    """The same step, which waits in each layer until queries, keys and values are there."""

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        mx.eval(queries, keys, values)
        return stock_attention(queries, keys, values, **options)

    stock_attention: Callable[..., mx.array] = vars(llama)["scaled_dot_product_attention"]

    def run_waiting() -> None:
        with patch.object(llama, "scaled_dot_product_attention", attention):
            run()

    return run_waiting


def measured(model: Any, batch: int, context: int, repetitions: int) -> dict[str, Any]:
    """One model at one batch and context, on both kinds of caches."""
    factory = PagedCacheFactory(model, max_bytes=4 << 30)
    kinds: dict[str, Callable[[], Caches]] = {
        "mlx_lm": lambda: make_prompt_cache(model),
        "paged": factory.make_cache,
    }
    steps = [
        step(model, filled(model, make(), batch, tokens), batch)
        for tokens in (context, 1)
        for make in kinds.values()
    ]
    steps.append(
        waiting(step(model, filled(model, make_prompt_cache(model), batch, context), batch))
    )
    stock, paged, stock_rest, paged_rest, stock_waiting = in_turns(*steps, repetitions=repetitions)
    return {
        "mlx_lm_tokens_per_second": batch / median(stock),
        "paged_tokens_per_second": batch / median(paged),
        "paged_over_mlx_lm": ratio(stock, paged),
        "mlx_lm_waiting_over_mlx_lm": ratio(stock, stock_waiting),
        "spread_of_mlx_lm": spread(stock),
        "mlx_lm_attention_share": 1 - median(stock_rest) / median(stock),
        "paged_attention_share": 1 - median(paged_rest) / median(paged),
    }


def main() -> None:
    mx.random.seed(0)
    cases = [
        ("stdlib-llama", "float32", (256, 1024, 4096), 41),
        ("smollm2", "float32", (256, 2048, 8192), 9),
        ("smollm2", "bfloat16", (256, 2048, 8192), 5),
    ]
    rows = []
    for name, dtype, contexts, repetitions in cases:
        model, _ = load_model(name, getattr(mx, dtype))
        for batch in (1, 8):
            for context in contexts:
                row = measured(model, batch, context, repetitions)
                about = {"model": f"{name}, {dtype}", "batch": batch, "context": context}
                rows.append(about | row)
                print(rows[-1], flush=True)
    figures = {"backend": PagedCacheFactory(model).stats().backend, "blas": BLAS, "rows": rows}
    write_result("whole_model", figures)


if __name__ == "__main__":
    main()
