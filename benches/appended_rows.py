"""deepseek_v41 on pages beside mlx-lm's own caches: python -m benches.appended_rows

One layer of each kind of a model with random weights has the sizes of the published one where the
cache counts: rows of 512 numbers, index keys of 128, groups of 4 tokens and of 1, a window of 128,
512 chosen rows. In turns, with each of the two caches:

    decode          a step behind 32,768 tokens
    bytes           what MLX holds for the sequence there
    copied_bytes    the rows that mlx-lm's cache copies in a step, by concatenation; pages copy none
    rewrites        how often slabs were joined while the context was written and in those steps
"""

import gc
from statistics import median
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.turns import in_turns, ratio
from tests.support.zoo import small_model

CONTEXT, CHUNK, STEPS = 32_768, 128, 60
SIZES: dict[str, Any] = {
    "head_dim": 512,
    "index_head_dim": 128,
    "qk_rope_head_dim": 64,
    "index_topk": 512,
    "compress_ratios": [0, 4, 4, 4, 1, 1],
    "sliding_window": 128,
    "candidate_topk_blocks": 256,
    "candidate_block_size": 8,
    "max_position_embeddings": 65_536,
}


def filled(cache: list[Any]) -> list[Any]:
    """A prompt cache with random rows for the context, written as the model writes them."""
    mx.random.seed(1)
    for begin in range(0, CONTEXT, CHUNK):
        for rate, layer in zip(SIZES["compress_ratios"], cache, strict=True):
            layer.update_window(mx.random.normal((1, CHUNK, 512)))
            if layer in (cache[1], cache[4]):
                rows = CHUNK // rate
                append(layer, "compress_kv", mx.random.normal((1, rows, 512)), begin)
                append(layer, "index_k", mx.random.normal((1, rows, 128)), begin)
        mx.eval([layer.state for layer in cache])
    return cache


def append(layer: Any, name: str, rows: mx.array, begin: int) -> None:
    new = mx.concatenate([getattr(layer, name), rows], axis=1) if begin else rows
    setattr(layer, name, new)


def held(cache: list[Any]) -> tuple[list[Any], int]:
    """The filled cache, and what MLX holds for it."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    filled(cache)
    gc.collect()
    return cache, mx.get_active_memory() - before


def main() -> None:
    model = small_model("deepseek_v41", **SIZES)
    factory = PagedCacheFactory(model, max_bytes="2GB")
    stock, stock_bytes = held(make_prompt_cache(model))
    paged, paged_bytes = held(factory.make_cache())
    tokens = mx.array([[5]])

    def step(cache: list[Any]) -> None:
        mx.eval(model(tokens, cache=cache))

    times, stock_times = in_turns(lambda: step(paged), lambda: step(stock), repetitions=STEPS)
    moves = sum(group.moves for group in factory.pool.groups)
    copied = sum(
        array.nbytes
        for layer in stock
        for array in (layer.compress_kv, layer.index_k)
        if array is not None
    )
    figures = {
        "blas": BLAS,
        "context": CONTEXT,
        "decode_milliseconds": 1e3 * median(times),
        "mlx_lm_decode_milliseconds": 1e3 * median(stock_times),
        "mlx_lm_over_paged": ratio(stock_times, times),
        "bytes": paged_bytes,
        "mlx_lm_bytes": stock_bytes,
        "bytes_over_mlx_lm": paged_bytes / stock_bytes,
        "copied_bytes": copied,
        "rewrites": moves,
    }
    print(figures)
    print(f"written to {write_result('appended_rows', figures)}")


if __name__ == "__main__":
    main()
