"""Bytes of quantised pages by length: python -m benches.quantised_bytes

One layer of a head of 32 in float16; a number takes as many bits with more heads. So many sequences
are written in steps of 2,048 tokens but for the last token, which is a step of its own. The pages
that are full by then have their format, and the page that is written has 16 bits.

bits        of the pages that the sequences hold, for each number of their keys and values
over_codes  how much more that is than if all tokens were in the format, scales included
peak_bits   the same at the largest after any of the steps
"""

from typing import Any

import mlx.core as mx

from benches.results_file import write_result
from paged_kv import PagedKVCache, PagePool, Sequence

HEAD = 32
FORMATS = {"q8": 8.5, "q4": 4.5}
LENGTHS = (1 << 10, 1 << 12, 1 << 15, 1 << 17)
ROWS = (1, 8)
STEP = 2048


def bits(name: str, rows: int, tokens: int) -> dict[str, float]:
    pool = PagePool(1, page_format=name, max_bytes=1 << 30)
    cache = PagedKVCache(pool, 0, [Sequence(pool) for _ in range(rows)])
    peak = now = 0.0
    steps = [*range(STEP, tokens - 1, STEP), tokens - 1, tokens]
    for end in steps:
        step = mx.zeros((rows, 1, end - cache.size(), HEAD), dtype=mx.float16)
        cache.update_and_fetch(step, step)
        now = 8 * pool.stats().bytes_active / (2 * HEAD * rows * tokens)
        peak = max(peak, now)
    return {"bits": now, "over_codes": now / FORMATS[name] - 1, "peak_bits": peak}


def main() -> None:
    figures: dict[str, Any] = {
        name: [
            {"rows": rows, "tokens": tokens, **bits(name, rows, tokens)}
            for rows in ROWS
            for tokens in LENGTHS
        ]
        for name in FORMATS
    }
    print(f"written to {write_result('quantised_bytes', figures)}")


if __name__ == "__main__":
    main()
