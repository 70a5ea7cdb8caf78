"""Times reading and writing pages on a CPU, beside MLX and the machine, and quantised pages beside
those of 16 bits: python -m benches.cpu_kernels [cpu_kernels | quantised_kernels]

One layer of 8 key-value heads of 128 and 32 query heads. Sides that are compared take turns, and
each figure is the median of its repetitions; ratios are medians of ratios within a turn.

cpu_kernels, in float16 and bfloat16:

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

quantised_kernels, in float16:

    decode       one query token for each sequence: pages of each format, beside those of 16 bits
    mlx_lm       the same at 1 sequence of 32K, beside mlx-lm's attention to keys and values of 4
                 bits
    prefill      512 new tokens after 4,096
    prompt       the first 512 tokens: their write, their attention, and the recoding of their pages
    model        stdlib-llama in bfloat16, in CPU time: a prompt of 1,100 tokens for each sequence,
                 and decode steps that recode a page of each (three) beside those that do not
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import process_time
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from benches.models import load_model
from benches.one_layer import (
    DIM,
    DTYPES,
    GEOMETRY,
    KV_HEADS,
    QUERY_HEADS,
    SCALE,
    Layer,
    normal,
)
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.turns import in_turns, ratio, spread
from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.page_format import PAGE_SIZE

LONG, SHORT = 32 * 1024, 1024
SPARE_PAGES = 1024
FORMATS = ("fp16", "q8", "q4")
RECODING_STEPS = 3

Figures = dict[str, Any]
Work = Callable[[], None]


class Reading:
    """Two threads of numpy that read all of an array of 1 GiB."""

    def __init__(self) -> None:
        self._halves = np.split(np.ones(1 << 27, dtype=np.int64), 2)
        self._threads = ThreadPoolExecutor(2)
        self.bytes = sum(half.nbytes for half in self._halves)

    def __call__(self) -> None:
        list(self._threads.map(np.max, self._halves))


def attend_with_mlx(layer: Layer, queries: mx.array) -> Work:
    mask = "causal" if queries.shape[2] > 1 else None
    attention = mx.fast.scaled_dot_product_attention
    return lambda: mx.eval(attention(queries, layer.keys, layer.values, scale=SCALE, mask=mask))


def decode(tokens: int, dtype: mx.Dtype) -> Figures:
    layer = Layer(1, tokens, dtype)
    queries = layer.queries()
    # A short context is over before the clock has ticked often enough.
    repetitions = 9 if tokens == LONG else 101
    sides = layer.attend(queries), attend_with_mlx(layer, queries)
    pages, stock = in_turns(*sides, repetitions=repetitions)
    return {
        "pages_seconds": median(pages),
        "mlx_seconds": median(stock),
        "times_mlx": ratio(stock, pages),
        "pages_bytes_per_second": layer.kv_bytes / median(pages),
        "mlx_bytes_per_second": layer.kv_bytes / median(stock),
    }


def decode_of_a_batch(dtype: mx.Dtype, reading: Reading) -> Figures:
    layer = Layer(8, LONG, dtype)
    pages, read = in_turns(layer.attend(layer.queries()), reading, repetitions=15)
    return {
        "pages_seconds": median(pages),
        "pages_bytes_per_second": layer.kv_bytes / median(pages),
        "read_bytes_per_second": reading.bytes / median(read),
        "share_of_bandwidth": ratio(read, pages) * layer.kv_bytes / reading.bytes,
    }


def short_beside_long(dtype: mx.Dtype) -> Figures:
    short, long = (Layer(1, tokens, dtype) for tokens in (SHORT, LONG))
    queries = long.queries()
    at_short, at_long = in_turns(short.attend(queries), long.attend(queries), repetitions=61)
    return {
        "short_seconds": median(at_short),
        "long_seconds": median(at_long),
        "short_over_long_per_byte": ratio(at_short, at_long) * long.kv_bytes / short.kv_bytes,
        "spread_of_long": spread(at_long),
    }


def prefill(dtype: mx.Dtype, new: int = 512, before: int = 4096) -> Figures:
    layer = Layer(1, before + new, dtype)
    queries = layer.queries(new)
    left, right = (np.random.default_rng(0).random((4096, 4096), np.float32) for _ in range(2))
    sides = layer.attend(queries), attend_with_mlx(layer, queries), lambda: left @ right
    pages, stock, product = in_turns(*sides, repetitions=7)
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


def write(dtype: mx.Dtype, batch: int = 8) -> Figures:
    small, large = (Layer(batch, 300, dtype, spare=spare) for spare in (0, SPARE_PAGES))
    keys, values = (normal(batch, KV_HEADS, 1, DIM, dtype=dtype) for _ in range(2))
    source = np.asarray(mx.concatenate([keys, values]).view(mx.uint16))
    target = np.empty_like(source)

    def writing(layer: Layer) -> Work:
        metadata = layer.metadata(301)
        return lambda: layer.pages.write(keys, values, metadata)

    sides = writing(small), writing(large), lambda: np.copyto(target, source)
    in_small, in_large, copied = in_turns(*sides, repetitions=501)
    pages = sum(map(len, small.tables))
    return {
        "bytes": source.nbytes,
        "pages_in_small_pool": pages,
        "pages_in_large_pool": pages + SPARE_PAGES,
        "small_pool_seconds": median(in_small),
        "large_pool_seconds": median(in_large),
        "copy_seconds": median(copied),
        "large_over_small": ratio(in_large, in_small),
    }


def overhead(dtype: mx.Dtype) -> Figures:
    layer = Layer(1, 300, dtype)
    keys, values = (normal(1, KV_HEADS, 1, DIM, dtype=dtype) for _ in range(2))
    queries = layer.queries()

    def step(tokens: int) -> Work:
        metadata = layer.metadata(tokens)

        def write_and_attend() -> None:
            layer.pages.write(keys, values, metadata)
            mx.eval(layer.pages.attend(queries, metadata, Attention(SCALE)))

        return write_and_attend

    at_300, at_1 = in_turns(step(300), step(1), repetitions=501)
    return {"at_300_seconds": median(at_300), "at_1_seconds": median(at_1)}


def shuffled_pages(dtype: mx.Dtype) -> Figures:
    in_order, shuffled = (Layer(1, LONG, dtype, shuffled=how) for how in (False, True))
    queries = in_order.queries()
    straight, mixed = in_turns(in_order.attend(queries), shuffled.attend(queries), repetitions=41)
    return {
        "shuffled_over_in_order": ratio(mixed, straight),
        "spread_of_in_order": spread(straight),
    }


def cpu_kernels() -> Figures:
    """Pages of 16 bits beside MLX, the memory and the processor."""
    reading = Reading()
    (read,) = in_turns(reading, repetitions=9)
    figures: Figures = {"read_bytes_per_second": reading.bytes / median(read)}
    for name, dtype in DTYPES.items():
        figures[name] = {
            "decode_of_1_at_32k": decode(LONG, dtype),
            "decode_of_1_at_1k": decode(SHORT, dtype),
            "short_beside_long": short_beside_long(dtype),
            "decode_of_8_at_32k": decode_of_a_batch(dtype, reading),
            "prefill": prefill(dtype),
            "write": write(dtype),
            "overhead": overhead(dtype),
            "shuffled_pages": shuffled_pages(dtype),
        }
    return figures


def beside_16_bits(works: list[Work], repetitions: int) -> Figures:
    times = dict(zip(FORMATS, in_turns(*works, repetitions=repetitions), strict=True))
    return {
        name: {"seconds": median(own), "times_fp16": ratio(times["fp16"], own)}
        for name, own in times.items()
    }


def attention(batch: int, tokens: int, queries: int, repetitions: int) -> Figures:
    layers = [Layer(batch, tokens, page_format=name) for name in FORMATS]
    asked = layers[0].queries(queries)
    return beside_16_bits([layer.attend(asked) for layer in layers], repetitions)


def prompt(tokens: int, repetitions: int) -> Figures:
    """What one row's first step costs; pages of 16 bits are not copied."""
    layers = {name: Layer(1, tokens, page_format=name) for name in FORMATS}
    asked = layers["fp16"].queries(tokens)

    def first_step(name: str, layer: Layer) -> Work:
        metadata = AttentionMetadata((layer.written,), (tokens,), (0,))
        (table,) = layer.tables
        copies = {} if name == "fp16" else dict(zip(layer.written, table, strict=True))

        def work() -> None:
            layer.pages.write(layer.keys, layer.values, metadata)
            mx.eval(layer.pages.attend(asked, metadata, Attention(SCALE)))
            layer.pages.copy(copies)

        return work

    return beside_16_bits([first_step(*each) for each in layers.items()], repetitions)


def mlx_lm(repetitions: int = 3) -> Figures:
    layer = Layer(1, LONG, page_format="q4")
    asked = layer.queries()
    keys, values = (mx.quantize(each, group_size=64, bits=4) for each in (layer.keys, layer.values))
    mx.eval(keys, values)

    def stock() -> None:
        mx.eval(
            quantized_scaled_dot_product_attention(
                asked, keys, values, scale=SCALE, mask=None, group_size=64, bits=4
            )
        )

    pages, theirs = in_turns(layer.attend(asked), stock, repetitions=repetitions)
    return {
        "q4_seconds": median(pages),
        "mlx_lm_seconds": median(theirs),
        "times_mlx_lm": ratio(theirs, pages),
    }


def model_steps(rows: int) -> Figures:
    """Steps of the formats follow each other in turns."""
    model, _ = load_model("stdlib-llama", mx.bfloat16)
    caches = {
        name: PagedCacheFactory(model, page_format=name, max_bytes=1 << 31).make_cache()
        for name in FORMATS
    }
    taken: dict[str, dict[str, list[float]]] = {
        name: {"prefill": [], "decode": [], "recoding": []} for name in FORMATS
    }

    def take(cache: Any, count: int) -> float:
        tokens, begin = mx.zeros((rows, count), dtype=mx.int32), process_time()
        mx.eval(model(tokens, cache=cache))
        return process_time() - begin

    for count in (512, 512, 76):
        for name, cache in caches.items():
            taken[name]["prefill"].append(take(cache, count))
    while len(taken[FORMATS[-1]]["recoding"]) < RECODING_STEPS:
        for name, cache in caches.items():
            kind = "decode" if cache[0].size() % PAGE_SIZE else "recoding"
            taken[name][kind].append(take(cache, 1))
    return {
        name: {
            "prefill": sum(times["prefill"]),
            "decode": median(times["decode"]),
            "recoding": median(times["recoding"]),
        }
        for name, times in taken.items()
    }


def quantised_kernels() -> Figures:
    """Pages of fewer bits beside those of 16 and mlx-lm's."""
    return {
        "decode_of_1_at_1k": attention(1, SHORT, 1, 301),
        "decode_of_8_at_1k": attention(8, SHORT, 1, 101),
        "decode_of_1_at_32k": attention(1, LONG, 1, 21),
        "decode_of_8_at_32k": attention(8, LONG, 1, 9),
        "mlx_lm_of_1_at_32k": mlx_lm(),
        "prefill": attention(1, 4096 + 512, 512, 5),
        "prompt_of_512": prompt(512, 21),
        "model_of_1": model_steps(1),
        "model_of_8": model_steps(8),
    }


BENCHES = {each.__name__: each for each in (cpu_kernels, quantised_kernels)}


def main() -> None:
    for name in sys.argv[1:] or BENCHES:
        mx.random.seed(0)
        write_result(name, {"backend": choose_backend().name, **GEOMETRY, **BENCHES[name]()})


if __name__ == "__main__":
    main()
