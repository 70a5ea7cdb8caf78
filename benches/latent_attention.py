"""Times decode of latent attention (MLA) from pages: python -m benches.latent_attention

One layer of DeepSeek-V3: latents of 512, position keys of 64, 128 query heads. Sides that are
compared take turns; figures are medians of their repetitions, and ratios are medians of ratios
within a turn.

    decode   one query token for each sequence, in pages: beside mlx-lm's operations on arrays, and
             beside numpy's float32 products of as many heads and latents, on as many threads
             mlx-lm's only for one sequence: MLX 0.32.4 crashes on a CPU where batch * heads *
             tokens * 512 reaches 2^32
    step     a layer's whole step, 8 heads at 512 tokens: update_and_fetch, scores and attention
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", str(os.cpu_count()))  # before numpy is imported

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from benches.one_layer import DTYPES, normal
from benches.results_file import write_result
from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import ATTENTION, OPERATIONS
from paged_kv.integrations.bench.turns import in_turns, ratio, spread
from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE, LayerGeometry, page_format_named

DIM, POSITIONS, HEADS, SCALE = 512, 64, 128, 192**-0.5
STEP_HEADS, STEP_TOKENS = 8, 512
CONTEXTS, BATCHES = (8 * 1024, 32 * 1024), (1, 8)
# A call of mlx-lm's operations takes many seconds at 32K.
MLX_LM_REPETITIONS = {8 * 1024: 5, 32 * 1024: 2}
REPETITIONS = {1: 21, 8: 7}


def queries_of(batch: int, heads: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Queries, and position queries times the scale."""
    positions = normal(batch, heads, 1, POSITIONS, dtype=dtype) * SCALE
    mx.eval(positions)
    return normal(batch, heads, 1, DIM, dtype=dtype), positions


def paged(
    latents: mx.array, position_keys: mx.array, asked: tuple[mx.array, mx.array]
) -> Callable[[], None]:
    """Attention to pages that hold these latents."""
    (batch, _, tokens, _), dtype = latents.shape, latents.dtype
    per_row = tokens // PAGE_SIZE
    geometry = LayerGeometry(1, DIM, dtype, 1, POSITIONS, dtype)
    pages = LayerPages(geometry, choose_backend(), 1 << 16)
    pages.map_slab(0, batch * per_row, page_format_named("fp16"))
    tables = tuple(tuple(range(per_row * row, per_row * (row + 1))) for row in range(batch))
    metadata = AttentionMetadata(tables, (tokens,) * batch, (0,) * batch)
    pages.write(latents, position_keys, metadata)
    queries, positions = asked
    return lambda: mx.eval(pages.attend(queries, metadata, Attention(SCALE), None, positions))


def stock(
    latents: mx.array, position_keys: mx.array, asked: tuple[mx.array, mx.array]
) -> Callable[[], None]:
    """What mlx-lm's models compute."""

    def attend() -> None:
        scores = asked[1] @ position_keys.swapaxes(-1, -2)
        mx.eval(
            mx.fast.scaled_dot_product_attention(
                asked[0], latents, latents, scale=SCALE, mask=scores
            )
        )

    return attend


def products(batch: int, tokens: int) -> Callable[[], None]:
    """numpy's products of heads and latents, in float32: no softmax, and nothing converted."""
    numbers = np.random.default_rng(0)
    queries = numbers.random((HEADS, DIM + POSITIONS), np.float32)
    keys = numbers.random((tokens, DIM + POSITIONS), np.float32)

    def multiply() -> None:
        for _ in range(batch):
            (queries @ keys.T) @ keys[:, :DIM]

    return multiply


def decode(batch: int, tokens: int, dtype: mx.Dtype) -> dict[str, Any]:
    latents = normal(batch, 1, tokens, DIM, dtype=dtype)
    position_keys = normal(batch, 1, tokens, POSITIONS, dtype=dtype)
    asked = queries_of(batch, HEADS, dtype)
    ours = paged(latents, position_keys, asked)
    pages, numpy = in_turns(ours, products(batch, tokens), repetitions=REPETITIONS[batch])
    operations = 2 * batch * tokens * HEADS * (2 * DIM + POSITIONS)
    figures = {
        "seconds": median(pages),
        "operations_per_second": operations / median(pages),
        "times_numpy": ratio(numpy, pages),
        "spread": spread(pages),
    }
    if batch == 1:
        theirs = stock(latents, position_keys, asked)
        pages, mlx_lm = in_turns(ours, theirs, repetitions=MLX_LM_REPETITIONS[tokens])
        figures |= {"mlx_lm_seconds": median(mlx_lm), "times_mlx_lm": ratio(mlx_lm, pages)}
    return figures


def step_of(cache: Any, latents: mx.array, position_keys: mx.array, dtype: mx.Dtype) -> Any:
    """A layer's step, as mlx-lm's models write it. The token is taken back afterwards."""
    cache.update_and_fetch(latents, position_keys)
    queries, position_queries = queries_of(1, STEP_HEADS, dtype)
    new = latents[:, :, :1], position_keys[:, :, :1]
    mx.eval(new, cache.state)

    def step() -> None:
        held, positions = cache.update_and_fetch(*new)
        scores = position_queries @ positions.swapaxes(-1, -2)
        mx.eval(
            base.scaled_dot_product_attention(
                queries, held, held, cache=cache, scale=SCALE, mask=scores
            )
        )
        del held, positions, scores
        cache.trim(1)

    return step


def steps(dtype: mx.Dtype) -> dict[str, Any]:
    latents, position_keys = (
        normal(1, 1, STEP_TOKENS, dim, dtype=dtype) for dim in (DIM, POSITIONS)
    )
    pool = PagePool(1, max_bytes=1 << 26)
    caches = [PagedKVCache(pool, 0, [Sequence(pool)]), KVCache()]
    ours, theirs = (step_of(cache, latents, position_keys, dtype) for cache in caches)
    before = pool.stats().gather_fallbacks
    pages, mlx_lm = in_turns(ours, theirs, repetitions=101)
    return {
        "seconds": median(pages),
        "mlx_lm_seconds": median(mlx_lm),
        "times_mlx_lm": ratio(mlx_lm, pages),
        "gathers": pool.stats().gather_fallbacks - before,
    }


def main() -> None:
    mx.random.seed(0)
    for each in (ATTENTION, OPERATIONS):
        each.install([sys.modules[__name__]])
    figures: dict[str, Any] = {
        "backend": choose_backend().name,
        "heads": HEADS,
        "dims": [DIM, POSITIONS],
        "threads_of_numpy": os.environ["OPENBLAS_NUM_THREADS"],
        "step_heads": STEP_HEADS,
        "step_tokens": STEP_TOKENS,
    }
    for name, dtype in DTYPES.items():
        figures[name] = {"step": steps(dtype)}
        for tokens in CONTEXTS:
            for batch in BATCHES:
                figures[name][f"decode_of_{batch}_at_{tokens // 1024}k"] = decode(
                    batch, tokens, dtype
                )
    write_result("latent_attention", figures)


if __name__ == "__main__":
    main()
