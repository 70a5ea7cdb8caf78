"""Times quantised pages beside 16-bit ones and mlx-lm's: python -m benches.quantised_kernels

One layer of 8 key-value heads of 128 and 32 query heads, float16. Sides that are compared take
turns, and each figure is the median of its repetitions; ratios are medians of ratios within a turn.

    decode   one query token for each sequence: pages of each format, beside those of 16 bits
    mlx_lm   the same at 1 sequence of 32K, beside mlx-lm's attention to keys and values of 4 bits
    prefill  512 new tokens after 4,096
    prompt   the first 512 tokens: their write, their attention, and the recoding of their pages
    model    stdlib-llama in bfloat16, in CPU time: a prompt of 1,100 tokens for each sequence, and
             decode steps that recode a page of each (three) beside those that do not

Arguments name the parts to measure again, such as model_of_1; the others stay as they were.
"""

import sys
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from benches.models import load_model
from benches.results_file import latest_figures, write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry, page_format_named

KV_HEADS, DIM, QUERY_HEADS = 8, 128, 32
SCALE = DIM**-0.5
LONG, SHORT = 32 * 1024, 1024
FORMATS = ("fp16", "q8", "q4")
STRIDE = 1 << 16
RECODING_STEPS = 3


def random(batch: int, heads: int, tokens: int) -> mx.array:
    array = mx.random.normal((batch, heads, tokens, DIM)).astype(mx.float16)
    mx.eval(array)
    return array


class Layer:
    """B rows of so many tokens in pages of one format."""

    def __init__(self, name: str, batch: int, tokens: int) -> None:
        geometry = LayerGeometry(KV_HEADS, DIM, mx.float16, KV_HEADS, DIM, mx.float16)
        self.pages = LayerPages(geometry, choose_backend(), STRIDE)
        per_row = -(-tokens // PAGE_SIZE)
        self.pages.map_slab(0, per_row, FP16)
        self.pages.map_slab(1, batch * per_row, page_format_named(name))
        written = tuple(range(per_row))
        tables = tuple(
            tuple(STRIDE + per_row * row + page for page in written) for row in range(batch)
        )
        self.metadata = AttentionMetadata(tables, (tokens,) * batch, (0,) * batch)
        for table in tables:
            step = random(1, KV_HEADS, tokens)
            self.pages.write(step, step, AttentionMetadata((written,), (tokens,), (0,)))
            self.pages.copy(dict(zip(written, table, strict=True)))

    def attend(self, queries: mx.array) -> Callable[[], None]:
        return lambda: mx.eval(self.pages.attend(queries, self.metadata, Attention(SCALE)))

    def prompt(self, queries: mx.array, step: mx.array) -> Callable[[], None]:
        """What one row's first step costs; pages of 16 bits are not copied."""
        (recoded,), tokens = self.metadata.block_tables, step.shape[2]
        written = tuple(range(len(recoded)))
        metadata = AttentionMetadata((written,), (tokens,), (0,))
        is_quantised = self.pages.layout_of(STRIDE).page_format != FP16
        copies = dict(zip(written, recoded, strict=True)) if is_quantised else {}

        def work() -> None:
            self.pages.write(step, step, metadata)
            mx.eval(self.pages.attend(queries, metadata, Attention(SCALE)))
            self.pages.copy(copies)

        return work


def beside_16_bits(works: list[Callable[[], None]], repetitions: int) -> dict[str, Any]:
    times = dict(zip(FORMATS, in_turns(*works, repetitions=repetitions), strict=True))
    return {
        name: {"seconds": median(own), "times_fp16": ratio(times["fp16"], own)}
        for name, own in times.items()
    }


def attention(batch: int, tokens: int, queries: int, repetitions: int) -> dict[str, Any]:
    asked = random(batch, QUERY_HEADS, queries)
    layers = [Layer(name, batch, tokens) for name in FORMATS]
    return beside_16_bits([layer.attend(asked) for layer in layers], repetitions)


def prompt(tokens: int, repetitions: int) -> dict[str, Any]:
    asked, step = random(1, QUERY_HEADS, tokens), random(1, KV_HEADS, tokens)
    layers = [Layer(name, 1, tokens) for name in FORMATS]
    return beside_16_bits([layer.prompt(asked, step) for layer in layers], repetitions)


def model_steps(rows: int) -> dict[str, Any]:
    """Steps of the formats follow each other in turns."""
    model, _ = load_model("stdlib-llama", mx.bfloat16)
    caches = {
        name: PagedCacheFactory(model, page_format=name, max_bytes=1 << 31).make_cache()
        for name in FORMATS
    }
    prefill: dict[str, list[float]] = {name: [] for name in FORMATS}
    steps: dict[str, list[float]] = {name: [] for name in FORMATS}
    recoding: dict[str, list[float]] = {name: [] for name in FORMATS}
    for count in (512, 512, 76):
        for name, cache in caches.items():
            prefill[name].append(cpu_seconds(model, cache, rows, count))
    while len(recoding[FORMATS[-1]]) < RECODING_STEPS:
        for name, cache in caches.items():
            taken = steps if cache[0].size() % PAGE_SIZE else recoding
            taken[name].append(cpu_seconds(model, cache, rows, 1))
    return {
        name: {
            "prefill": sum(prefill[name]),
            "decode": median(steps[name]),
            "recoding": median(recoding[name]),
        }
        for name in FORMATS
    }


def cpu_seconds(model: Any, cache: Any, rows: int, count: int) -> float:
    tokens, begin = mx.zeros((rows, count), dtype=mx.int32), process_time()
    mx.eval(model(tokens, cache=cache))
    return process_time() - begin


def mlx_lm(repetitions: int = 3) -> dict[str, Any]:
    asked = random(1, QUERY_HEADS, 1)
    layer = Layer("q4", 1, LONG)
    keys, values = (mx.quantize(random(1, KV_HEADS, LONG), group_size=64, bits=4) for _ in range(2))
    mx.eval(keys, values)
    pages, stock = in_turns(
        layer.attend(asked),
        lambda: mx.eval(
            quantized_scaled_dot_product_attention(
                asked, keys, values, scale=SCALE, mask=None, group_size=64, bits=4
            )
        ),
        repetitions=repetitions,
    )
    return {
        "q4_seconds": median(pages),
        "mlx_lm_seconds": median(stock),
        "times_mlx_lm": ratio(stock, pages),
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "decode_of_1_at_1k": lambda: attention(1, SHORT, 1, 301),
    "decode_of_8_at_1k": lambda: attention(8, SHORT, 1, 101),
    "decode_of_1_at_32k": lambda: attention(1, LONG, 1, 21),
    "decode_of_8_at_32k": lambda: attention(8, LONG, 1, 9),
    "mlx_lm_of_1_at_32k": mlx_lm,
    "prefill": lambda: attention(1, 4096 + 512, 512, 5),
    "prompt_of_512": lambda: prompt(512, 21),
    "model_of_1": lambda: model_steps(1),
    "model_of_8": lambda: model_steps(8),
}


def main() -> None:
    mx.random.seed(0)
    earlier = latest_figures("quantised_kernels")
    figures: dict[str, Any] = {
        "backend": choose_backend().name,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "query_heads": QUERY_HEADS,
        **{name: earlier[name] for name in PARTS if name in earlier},
        **{name: PARTS[name]() for name in sys.argv[1:] or PARTS},
    }
    write_result("quantised_kernels", figures)


if __name__ == "__main__":
    main()
