"""The cost of layers with a sliding window on rings of pages: python -m benches.rings

memory       bytes of one sequence in the geometry of gemma3 1B: 22 layers with a window of 1,024
             and 4 full ones, one KV head of 256 in float16. Those of pages are what MLX holds for
             the pool after a prefill in steps of 2,048 and one more token, and those in use equal
             the formula; mlx-lm's are the nbytes of its RotatingKVCache and KVCache after the same
             steps. A ring of 2W is what a ring of two windows would take in the 22 layers, in
             tokens.
decode       one window layer (W=1024, 8 KV heads of 128, 32 query heads, float16), a token
             written and attended to, at growing positions. In turns, medians.
prefill      8,192 tokens of stdlib-gemma3 in float32, in steps of 2,048, with mlx-lm's caches and
             with pages, in turns. Peak memory is MLX's, less what was active before.
allocations  blocks allocated or copied while 10,000 tokens are decoded in rings that are full.

Prefill is float32 with the BLAS that the results name.
"""

from benches.openblas import BLAS

import gc
import logging
from collections import abc
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from benches.models import load_model, random_tokens
from benches.results_file import write_result
from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.integrations.bench.turns import in_turns, ratio, seconds, spread
from paged_kv.pool.layer_kinds import Window

WINDOW, WINDOW_LAYERS, FULL_LAYERS = 1024, 22, 4
CHUNKS, CONTEXTS = (256, 1024), (4096, 32768)
HEAD_DIM, STEP = 256, 2048
TOKEN_BYTES = 2 * HEAD_DIM * 2
POSITIONS = (2048, 8192, 32768, 131072)
KV_HEADS, Q_HEADS, DIM = 8, 32, 128
DECODE_REPETITIONS, PREFILL_REPETITIONS, PREFILL_TOKENS = 301, 3, 8192
DECODED = 10_000


def new_caches(pool: PagePool) -> list[PagedKVCache]:
    sequence = Sequence(pool)
    return [PagedKVCache(pool, layer, [sequence]) for layer in range(pool.num_layers)]


def windowed_pool(write_chunk: int, layers: int = WINDOW_LAYERS, full: int = 0) -> PagePool:
    windows = dict.fromkeys(range(layers), Window(WINDOW, write_chunk))
    return PagePool(layers + full, windows=windows, max_bytes=4 << 30)


def fill(cache: Any, tokens: int, heads: int = 1, dim: int = HEAD_DIM) -> None:
    """A prefill, and then single tokens up to `tokens`."""
    steps = [*range(0, tokens - 1, STEP), tokens - 1, tokens]
    for start, end in pairwise(steps):
        keys = mx.zeros((1, heads, end - start, dim), dtype=mx.float16)
        fetched = cache.update_and_fetch(keys, keys)
        if not isinstance(cache, PagedKVCache):
            mx.eval(fetched)
        del fetched


def bytes_of(caches: abc.Sequence[Any], context: int) -> int:
    for cache in caches:
        fill(cache, context)
    return sum(int(cache.nbytes) for cache in caches)


def bytes_by_formula(context: int, write_chunk: int) -> int:
    ring = -(-(WINDOW + write_chunk - 1) // 256)
    full = -(-context // 256)
    return 256 * TOKEN_BYTES * (WINDOW_LAYERS * ring + FULL_LAYERS * full)


def memory() -> list[dict[str, Any]]:
    rows = []
    for context in CONTEXTS:
        rotating = [RotatingKVCache(max_size=WINDOW) for _ in range(WINDOW_LAYERS)]
        stock = bytes_of([*rotating, *[KVCache() for _ in range(FULL_LAYERS)]], context)
        double = TOKEN_BYTES * (WINDOW_LAYERS * 2 * WINDOW + FULL_LAYERS * context)
        for chunk in CHUNKS:
            pool = windowed_pool(chunk, full=FULL_LAYERS)
            caches, formula = new_caches(pool), bytes_by_formula(context, chunk)
            in_use = bytes_of(caches, context)
            assert in_use == formula, (in_use, formula)
            held = pool.stats().bytes_held
            row = {"context": context, "write_chunk": chunk, "paged_bytes": held}
            row |= {"formula_bytes": formula, "mlx_lm_bytes": stock, "ring_of_2w_bytes": double}
            rows.append(row)
    return rows


def decode_step(position: int) -> Callable[[], None]:
    """A token at about a position, in a cache of its own."""
    cache = new_caches(windowed_pool(256, layers=1))[0]
    fill(cache, position - DECODE_REPETITIONS, KV_HEADS, DIM)
    keys = mx.random.normal((1, KV_HEADS, 1, DIM), key=mx.random.key(1)).astype(mx.float16)
    queries = mx.random.normal((1, Q_HEADS, 1, DIM), key=mx.random.key(2)).astype(mx.float16)
    mx.eval(keys, queries)

    def step() -> None:
        mask = cache.make_mask(1)
        held = cache.update_and_fetch(keys, keys)
        mx.eval(paged_attention(queries, *held, cache, DIM**-0.5, mask))

    return step


def decode() -> list[dict[str, Any]]:
    # The first position twice: how far a side lies from itself in the same run.
    positions = (POSITIONS[0], *POSITIONS)
    columns = in_turns(*map(decode_step, positions), repetitions=DECODE_REPETITIONS)
    return [
        {
            "context": position,
            "microseconds": 1e6 * median(times),
            "over_first": ratio(times, columns[1]),
            "spread": spread(times),
        }
        for position, times in zip(positions, columns, strict=True)
    ]


def peak_of(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds and the peak of active memory of one call, less what was active before."""
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    return seconds(work), mx.get_peak_memory() - held


def prefill() -> dict[str, Any]:
    model, _ = load_model("stdlib-gemma3")
    tokens = random_tokens(model, PREFILL_TOKENS)

    def run(cache: list[Any]) -> None:
        for start in range(0, PREFILL_TOKENS, STEP):
            mx.eval(model(mx.array([tokens[start : start + STEP]]), cache=cache))

    def stock() -> None:
        run(make_prompt_cache(model))

    def paged() -> None:
        run(PagedCacheFactory(model, max_bytes=1 << 30).make_cache())

    turns = [(peak_of(stock), peak_of(paged)) for _ in range(PREFILL_REPETITIONS + 1)][1:]
    stock_times, paged_times = ([turn[side][0] for turn in turns] for side in (0, 1))
    stock_peak, paged_peak = (median(turn[side][1] for turn in turns) for side in (0, 1))
    return {
        "tokens": PREFILL_TOKENS,
        "step": STEP,
        "mlx_lm_seconds": median(stock_times),
        "paged_seconds": median(paged_times),
        "mlx_lm_over_paged": ratio(stock_times, paged_times),
        "spread_of_mlx_lm": spread(stock_times),
        "mlx_lm_peak_bytes": stock_peak,
        "paged_peak_bytes": paged_peak,
    }


def allocations() -> dict[str, int]:
    """Blocks and slabs before and after; what is used again needs neither."""
    pool = windowed_pool(256, layers=2)
    caches = new_caches(pool)
    for cache in caches:
        fill(cache, 4096)
    allocator = pool.groups[0].allocator
    before = pool.stats()
    keys = mx.zeros((1, 1, 1, HEAD_DIM), dtype=mx.float16)
    with patch.object(allocator, "take_free", wraps=allocator.take_free) as taken:
        for _ in range(DECODED):
            for cache in caches:
                cache.make_mask(1)
                cache.batch.append(cache.layer, keys, keys)
    after = pool.stats()
    return {
        "decoded": DECODED,
        "allocations": taken.call_count,
        "blocks_used_change": after.blocks_used - before.blocks_used,
        "blocks_copied": after.cow_copies - before.cow_copies,
        "bytes_mapped_change": after.bytes_mapped - before.bytes_mapped,
    }


def main() -> None:
    # Filling caches attends to nothing, and the pools would warn that nothing reads their pages.
    logging.getLogger("paged_kv").setLevel(logging.ERROR)
    figures = {
        "backend": PagePool(1, max_bytes=1 << 20).stats().backend,
        "blas": BLAS,
        "memory": memory(),
        "decode": decode(),
        "prefill": prefill(),
        "allocations": allocations(),
    }
    write_result("rings", figures)


if __name__ == "__main__":
    main()
