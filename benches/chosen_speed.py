"""Times decode that reads chosen tokens: python -m benches.chosen_speed

Sides take turns in one process. Figures are medians of their repetitions, and ratios are medians
of ratios within a turn.

    layer     one layer of 8 key-value heads of 128 and 32 query heads, float16 numbers, behind
              32K and 128K tokens in pages of each format: exact attention, and 1/4, 1/8 and 1/16
              of the tokens read. Beside each the same kernels at a context of so many tokens:
              what is left is what choosing takes
    fits      the same, where all tokens may be read, beside pages without summaries
    model     a decode step of the embedded model behind 32K tokens
"""

from benches.openblas import BLAS

from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx

from benches.models import load_model, random_tokens, read
from benches.one_layer import DIM, KV_HEADS, QUERY_HEADS, SCALE, STRIDE, new_pages, normal
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, page_format_named

LENGTHS, FORMATS, SHARES = (32 << 10, 128 << 10), ("fp16", "q8", "q4"), (4, 8, 16)
LATEST = 100  # tokens of the page that is being written
MODEL_TOKENS, MODEL_SHARES = 32 << 10, (4, 16)

Figures = dict[str, Any]


class Layer:
    """Pages of one layer, of which a context of any length up to theirs can be read."""

    def __init__(self, name: str, length: int, *, has_summaries: bool) -> None:
        self.pages = new_pages(has_summaries=has_summaries)
        full = length // PAGE_SIZE
        self.pages.map_slab(0, full, page_format_named(name))
        self.pages.map_slab(1, 2, FP16)
        mean = mx.random.normal((1, KV_HEADS, 1, DIM))
        for page in range(full):
            keys = mean + mx.random.normal((1, KV_HEADS, PAGE_SIZE, DIM))
            self._write(keys.astype(mx.float16), STRIDE)
            self.pages.copy({STRIDE: page})
        self._write(normal(1, KV_HEADS, LATEST, DIM), STRIDE + 1)

    def _write(self, keys: mx.array, entry: int) -> None:
        metadata = AttentionMetadata(((entry,),), (keys.shape[2],), (0,))
        self.pages.write(keys, keys, metadata)

    def step(self, length: int, read_tokens: int | None = None) -> Callable[[], None]:
        """A step behind so many tokens."""
        table = (*range(length // PAGE_SIZE), STRIDE + 1)
        metadata = AttentionMetadata((table,), (length + LATEST,), (0,))
        queries = normal(1, QUERY_HEADS, 1, DIM)
        attention = Attention(SCALE, read_tokens=read_tokens)
        return lambda: mx.eval(self.pages.attend(queries, metadata, attention))


def layer_rows(name: str, length: int) -> list[Figures]:
    """The figures of one layer behind so many tokens, for each share that is read."""
    layer = Layer(name, length, has_summaries=True)
    exact = layer.step(length)
    rows = []
    for share in SHARES:
        read_tokens = length // share
        sides = exact, layer.step(length, read_tokens), layer.step(read_tokens - LATEST)
        of_exact, of_chosen, of_short = in_turns(*sides, repetitions=31)
        times = {"format": name, **row_of(length, read_tokens, of_exact, of_chosen)}
        rows.append(times | {"as_short_seconds": median(of_short)})
    return rows


def row_of(tokens: int, read_tokens: int, exact: list[float], chosen: list[float]) -> Figures:
    """What both sides take behind so many tokens."""
    return {
        "tokens": tokens,
        "read_tokens": read_tokens,
        "exact_seconds": median(exact),
        "chosen_seconds": median(chosen),
        "times": ratio(exact, chosen),
    }


def fits(name: str, length: int) -> Figures:
    """How much faster a step without summaries is than one that may choose, but reads all."""
    plain, choosing = (Layer(name, length, has_summaries=each) for each in (False, True))
    sides = plain.step(length), choosing.step(length, length + LATEST)
    without, with_ = in_turns(*sides, repetitions=31)
    return {"format": name, "tokens": length, "times": ratio(without, with_)}


def model_rows() -> list[Figures]:
    """Decode steps of the embedded model."""
    model, _ = load_model("stdlib-llama")
    tokens = random_tokens(model, MODEL_TOKENS)
    reads = [MODEL_TOKENS // share for share in MODEL_SHARES]
    steps = []
    for read_tokens in (None, *reads):
        factory = PagedCacheFactory(model, read_tokens=read_tokens)
        cache = read(model, factory.make_cache(), tokens, 1024)

        def step(cache: Any = cache) -> None:
            mx.eval(model(mx.array([[7]]), cache=cache))

        steps.append(step)
    exact, *chosen = in_turns(*steps, repetitions=31)
    return [
        row_of(MODEL_TOKENS, read_tokens, exact, of_chosen)
        for read_tokens, of_chosen in zip(reads, chosen, strict=True)
    ]


def main() -> None:
    mx.random.seed(0)
    figures = {
        "blas": BLAS,
        "kv_heads": KV_HEADS,
        "dim": DIM,
        "query_heads": QUERY_HEADS,
        "layer": [
            row for name in FORMATS for length in LENGTHS for row in layer_rows(name, length)
        ],
        "fits": [fits(name, LENGTHS[0]) for name in FORMATS],
        "model": model_rows(),
    }
    write_result("chosen_speed", figures)


if __name__ == "__main__":
    main()
