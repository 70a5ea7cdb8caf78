"""Bytes of quantised pages by length: python -m benches.quantised_bytes

Layers of a head of 32 in float16; a number takes as many bits with more heads. So many sequences
are written in steps of 2,048 tokens but for the last token, which is a step of its own. The pages
that are full by then have their format, and the page that is written has 16 bits.

llama       one layer, whose queries see all tokens
gemma3      five layers with windows of 512 tokens, and one without. Windows keep 16 bits, in rings
            of few pages, which other tokens than the latest are no longer in.

bits        of the pages that the sequences hold, for each number of keys and values of all tokens
over_codes  how much more that is than if all tokens were in the format, scales included
peak_bits   the bits at the largest after any of the steps
"""

from typing import Any

import mlx.core as mx

from benches.results_file import write_result
from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.pool.window import DEFAULT_WRITE_CHUNK, Window

HEAD = 32
FORMATS = {"fp16": 16.0, "q8": 8.5, "q4": 4.5}
# The windows of each model's layers.
MODELS: dict[str, tuple[Window | None, ...]] = {
    "llama": (None,),
    "gemma3": (*[Window(512, DEFAULT_WRITE_CHUNK)] * 5, None),
}
LENGTHS = (1 << 10, 1 << 12, 1 << 15, 1 << 17)
ROWS = (1, 8)
STEP = 2048


def bits(model: str, name: str, rows: int, tokens: int) -> dict[str, float]:
    layers = MODELS[model]
    windows = {layer: window for layer, window in enumerate(layers) if window}
    pool = PagePool(len(layers), page_format=name, max_bytes=1 << 30, windows=windows)
    sequences = [Sequence(pool) for _ in range(rows)]
    caches = [PagedKVCache(pool, layer, sequences) for layer in range(len(layers))]
    held = []
    for end in [*range(STEP, tokens - 1, STEP), tokens - 1, tokens]:
        step = mx.zeros((rows, 1, end - caches[0].size(), HEAD), dtype=mx.float16)
        for cache in caches:
            cache.update_and_fetch(step, step)
        held.append(8 * pool.stats().bytes_active / (2 * HEAD * rows * tokens * len(layers)))
    over = held[-1] / FORMATS[name] - 1
    return {"bits": held[-1], "over_codes": over, "peak_bits": max(held)}


def main() -> None:
    figures: dict[str, Any] = {
        model: {
            name: [
                {"rows": rows, "tokens": tokens, **bits(model, name, rows, tokens)}
                for rows in ROWS
                for tokens in LENGTHS
            ]
            for name in FORMATS
        }
        for model in MODELS
    }
    print(f"written to {write_result('quantised_bytes', figures)}")


if __name__ == "__main__":
    main()
