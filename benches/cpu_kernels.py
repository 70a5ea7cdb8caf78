"""Times reading and writing pages on a CPU, beside MLX and the machine:
python -m benches.cpu_kernels

One layer of 8 key-value heads of 128 and 32 query heads. Sides that are compared take turns, and
each figure is the median of its repetitions; ratios are medians of ratios within a turn.

    decode       one query token for each row, beside MLX's attention over contiguous arrays of the
                 same numbers. Bytes are those of the keys and values that are read
    bandwidth    what two threads of numpy read, each the maximum of half of an array of 1 GiB: by
                 itself, and in turns with the decode of 8 rows, whose share of it is reported
    short        time per KV byte, 1K against 32K: decode of one sequence at 1K in turns with one at
                 32K, which evicts the short one from the processor's caches
    prefill      512 new tokens after 4,096, beside MLX over contiguous arrays, and beside the rate
                 of numpy's product of two float32 matrices of 4,096
    write        one token for 8 rows into a small and a large pool, beside numpy's copy of as many
                 bytes
    overhead     a layer's write and attend of one token after 299, beside the same after 1: the
                 time that does not depend on the tokens that are read
    pages        decode with pages in order, and in an order drawn at random
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from benches.results_file import write_result
from paged_kv.integrations.bench.turns import in_turns, ratio, spread
from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry

KV_HEADS, DIM, QUERY_HEADS = 8, 128, 32
SCALE = DIM**-0.5
STRIDE = 1 << 16
LONG, SHORT = 32 * 1024, 1024
SPARE_PAGES = 1024
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}


class Layer:
    """B rows of so many tokens: in pages, and as contiguous arrays."""

    def __init__(
        self, batch: int, tokens: int, dtype: mx.Dtype, *, spare: int = 0, shuffled: bool = False
    ) -> None:
        geometry = LayerGeometry(KV_HEADS, DIM, dtype, KV_HEADS, DIM, dtype)
        self.pages = LayerPages(geometry, choose_backend(), STRIDE)
        per_row = -(-(tokens + 1) // PAGE_SIZE)
        entries = list(range(batch * per_row))
        if shuffled:
            random.Random(0).shuffle(entries)
        self.pages.map_slab(0, len(entries) + spare, FP16)
        tables = [entries[per_row * row : per_row * (row + 1)] for row in range(batch)]
        self.tables = tuple(map(tuple, tables))
        self.dtype, self.batch, self.tokens = dtype, batch, tokens
        self.keys, self.values = self.random(KV_HEADS, tokens), self.random(KV_HEADS, tokens)
        self.pages.write(self.keys, self.values, self.metadata(tokens))

    def random(self, heads: int, tokens: int) -> mx.array:
        array = mx.random.normal((self.batch, heads, tokens, DIM)).astype(self.dtype)
        mx.eval(array)
        return array

    def metadata(self, tokens: int) -> AttentionMetadata:
        return AttentionMetadata(self.tables, (tokens,) * self.batch, (0,) * self.batch)

    @property
    def kv_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def attend(self, queries: mx.array) -> Callable[[], None]:
        metadata = self.metadata(self.tokens)
        return lambda: mx.eval(self.pages.attend(queries, metadata, Attention(SCALE)))

    def attend_with_mlx(self, queries: mx.array) -> Callable[[], None]:
        mask = "causal" if queries.shape[2] > 1 else None
        attention = mx.fast.scaled_dot_product_attention
        return lambda: mx.eval(attention(queries, self.keys, self.values, scale=SCALE, mask=mask))


class Reading:
    """Two threads of numpy that read all of an array of 1 GiB."""

    def __init__(self) -> None:
        self._halves = np.split(np.ones(1 << 27, dtype=np.int64), 2)
        self._threads = ThreadPoolExecutor(2)
        self.bytes = sum(half.nbytes for half in self._halves)

    def __call__(self) -> None:
        list(self._threads.map(np.max, self._halves))


def bandwidth(reading: Reading) -> float:
    """Bytes a second that two threads read."""
    (times,) = in_turns(reading, repetitions=9)
    return reading.bytes / median(times)


def decode(batch: int, tokens: int, dtype: str) -> dict[str, Any]:
    layer = Layer(batch, tokens, DTYPES[dtype])
    queries = layer.random(QUERY_HEADS, 1)
    # A short context is over before the clock has ticked often enough.
    repetitions = 9 if tokens == LONG else 101
    pages, stock = in_turns(
        layer.attend(queries), layer.attend_with_mlx(queries), repetitions=repetitions
    )
    return {
        "pages_seconds": median(pages),
        "mlx_seconds": median(stock),
        "times_mlx": ratio(stock, pages),
        "pages_bytes_per_second": layer.kv_bytes / median(pages),
        "mlx_bytes_per_second": layer.kv_bytes / median(stock),
    }


def decode_of_a_batch(batch: int, tokens: int, dtype: str, reading: Reading) -> dict[str, float]:
    layer = Layer(batch, tokens, DTYPES[dtype])
    pages, read = in_turns(layer.attend(layer.random(QUERY_HEADS, 1)), reading, repetitions=15)
    return {
        "pages_seconds": median(pages),
        "pages_bytes_per_second": layer.kv_bytes / median(pages),
        "read_bytes_per_second": reading.bytes / median(read),
        "share_of_bandwidth": ratio(read, pages) * layer.kv_bytes / reading.bytes,
    }


def short_beside_long(dtype: str) -> dict[str, float]:
    short, long = (Layer(1, tokens, DTYPES[dtype]) for tokens in (SHORT, LONG))
    queries = long.random(QUERY_HEADS, 1)
    at_short, at_long = in_turns(short.attend(queries), long.attend(queries), repetitions=61)
    return {
        "short_seconds": median(at_short),
        "long_seconds": median(at_long),
        "short_over_long_per_byte": ratio(at_short, at_long) * long.kv_bytes / short.kv_bytes,
        "spread_of_long": spread(at_long),
    }


def prefill(dtype: str, new: int = 512, before: int = 4096) -> dict[str, Any]:
    layer = Layer(1, before + new, DTYPES[dtype])
    queries = layer.random(QUERY_HEADS, new)
    left, right = (np.random.default_rng(0).random((4096, 4096), np.float32) for _ in range(2))
    pages, stock, product = in_turns(
        layer.attend(queries),
        layer.attend_with_mlx(queries),
        lambda: left @ right,
        repetitions=7,
    )
    # Two multiplications and two additions for every query, key it may see, head and dimension.
    work = 4 * QUERY_HEADS * DIM * (new * before + new * (new + 1) // 2)
    rate, product_rate = work / median(pages), 2 * 4096**3 / median(product)
    return {
        "pages_seconds": median(pages),
        "mlx_seconds": median(stock),
        "times_mlx": ratio(stock, pages),
        "pages_flops": rate,
        "matrix_product_flops": product_rate,
        "share_of_matrix_product": rate / product_rate,
    }


def write(dtype: str, batch: int = 8) -> dict[str, Any]:
    small, large = (Layer(batch, 300, DTYPES[dtype], spare=spare) for spare in (0, SPARE_PAGES))
    keys, values = small.random(KV_HEADS, 1), small.random(KV_HEADS, 1)
    source = np.asarray(mx.concatenate([keys, values]).view(mx.uint16))
    target = np.empty_like(source)

    def writing(layer: Layer) -> Callable[[], None]:
        metadata = layer.metadata(301)
        return lambda: layer.pages.write(keys, values, metadata)

    in_small, in_large, copied = in_turns(
        writing(small), writing(large), lambda: np.copyto(target, source), repetitions=501
    )
    return {
        "bytes": source.nbytes,
        "pages_in_small_pool": len(small.tables) * len(small.tables[0]),
        "pages_in_large_pool": len(small.tables) * len(small.tables[0]) + SPARE_PAGES,
        "small_pool_seconds": median(in_small),
        "large_pool_seconds": median(in_large),
        "copy_seconds": median(copied),
        "large_over_small": ratio(in_large, in_small),
    }


def overhead(dtype: str) -> dict[str, float]:
    layer = Layer(1, 300, DTYPES[dtype])
    keys, values = layer.random(KV_HEADS, 1), layer.random(KV_HEADS, 1)
    queries = layer.random(QUERY_HEADS, 1)

    def step(tokens: int) -> Callable[[], None]:
        metadata = layer.metadata(tokens)

        def write_and_attend() -> None:
            layer.pages.write(keys, values, metadata)
            mx.eval(layer.pages.attend(queries, metadata, Attention(SCALE)))

        return write_and_attend

    at_300, at_1 = in_turns(step(300), step(1), repetitions=501)
    return {"at_300_seconds": median(at_300), "at_1_seconds": median(at_1)}


def shuffled_pages(dtype: str) -> dict[str, float]:
    in_order, shuffled = (Layer(1, LONG, DTYPES[dtype], shuffled=how) for how in (False, True))
    queries = in_order.random(QUERY_HEADS, 1)
    straight, mixed = in_turns(in_order.attend(queries), shuffled.attend(queries), repetitions=41)
    return {
        "shuffled_over_in_order": ratio(mixed, straight),
        "spread_of_in_order": spread(straight),
    }


def main() -> None:
    mx.random.seed(0)
    reading = Reading()
    figures: dict[str, Any] = {
        "backend": choose_backend().name,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "query_heads": QUERY_HEADS,
        "read_bytes_per_second": bandwidth(reading),
    }
    for dtype in DTYPES:
        figures[dtype] = {
            "decode_of_1_at_32k": decode(1, LONG, dtype),
            "decode_of_1_at_1k": decode(1, SHORT, dtype),
            "short_beside_long": short_beside_long(dtype),
            "decode_of_8_at_32k": decode_of_a_batch(8, LONG, dtype, reading),
            "prefill": prefill(dtype),
            "write": write(dtype),
            "overhead": overhead(dtype),
            "shuffled_pages": shuffled_pages(dtype),
        }
    write_result("cpu_kernels", figures)


if __name__ == "__main__":
    main()
