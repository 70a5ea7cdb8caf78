"""Bytes that MLX holds for keys and values, by length: python -m benches.held_bytes

Every byte is of `mx.get_active_memory()`, less what MLX held before the pool was made: memory that
is mapped, whether a token is in it or not. A layer has one head of 128 in float16; a number takes
as many bits with more heads, and in q4 a few more with smaller ones. Prompts are written in steps
of 2,048 tokens, and what follows as in decoding: where a page begins in a step of one token, and
the rest of the page in another step, which maps nothing.

by length   prompts and one more token, for which a page begins. gemma3 is a model whose layers have
            windows of 512 tokens, but for every sixth. Windows keep 16 bits, in rings of few pages
one row     a sequence grows from 1K to 64K tokens

bits        held, for each number of keys and values of all tokens. mlx-lm's arrays have room for up
            to 256 tokens more than they hold
over_needed held, beside what the tokens need: full pages in their format, and the page of each row
            that is written in 16 bits. With 16 bits in all pages that is every token's 16 bits
over_codes  held, beside all tokens in their format, scales included
peak_bits   the bits at the largest after any of the steps
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from matplotlib import rc_context
from matplotlib.figure import Figure
from mlx_lm.models.cache import KVCache

from benches.results_file import write_result
from paged_kv import PagedKVCache, PagePool
from paged_kv import Sequence as PagedSequence
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.kernels.pages.page_format import PAGE_SIZE, page_format_named
from paged_kv.pool.layer_kinds import DEFAULT_WRITE_CHUNK, Window

HEAD, LAYERS, STEP = 128, 4, 2048
# Bits of a number, with its part of a scale, and of the centre of its page: q4 has 5 bits for keys.
CODES = {"fp16": 16.0, "q8": 8.5, "q4": (5 + 16 / 128 + 16 / 256 + 4 + 16 / 64) / 2}
BUDGETS: dict[str, str | None] = {"256MB": "256MB", "1GB": "1GB", "default": None}
SHORTEST, LONGEST, HEADLINE = 1 << 10, 1 << 16, 1 << 15
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "held.svg"
# A palette that colour-blind readers can tell apart (Okabe and Ito).
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#e69f00")
# The windows of the layers of models, and lengths of their prompts.
MODELS: dict[str, tuple[Window | None, ...]] = {
    "llama": (None,) * LAYERS,
    "gemma3": (*[Window(512, DEFAULT_WRITE_CHUNK)] * 5, None),
}
LENGTHS, ROWS = (1 << 10, 1 << 12, 1 << 15), (1, 8)


class Rows:
    """Sequences of one pool, alone in MLX's memory.

    Attributes:
        most_held: the most bytes that MLX held after any step.
    """

    def __init__(
        self,
        page_format: str,
        max_bytes: str | None,
        lengths: Sequence[int],
        windows: tuple[Window | None, ...] = MODELS["llama"],
    ) -> None:
        gc.collect()
        # Freed memory that MLX keeps for later arrays is not held by any.
        mx.set_cache_limit(0)
        self._before = mx.get_active_memory()
        self.page_format = page_format
        self.pool = PagePool(
            len(windows),
            windows={layer: window for layer, window in enumerate(windows) if window},
            page_format=page_format,
            max_bytes=max_bytes,
        )
        # Attention reads pages, and nothing else does.
        self.pool.attending = self.pool.attending_in_decode = frozenset(range(len(windows)))
        # Of keys and values of a token in all layers.
        self.numbers = 2 * len(windows) * HEAD
        self.most_held = 0
        self.sequences = [PagedSequence(self.pool) for _ in lengths]
        for sequence, length in zip(self.sequences, lengths, strict=True):
            for start in range(0, length, STEP):
                self.write([sequence], min(STEP, length - start))

    @property
    def lengths(self) -> list[int]:
        return [sequence.length for sequence in self.sequences]

    @property
    def held(self) -> int:
        """Bytes that MLX holds."""
        return mx.get_active_memory() - self._before

    @property
    def needed(self) -> float:
        """Bytes that the tokens need."""
        bits = 0.0
        for length in self.lengths:
            full = (length - 1) // PAGE_SIZE * PAGE_SIZE
            first = min(full, PAGE_SIZE)
            written = length - full if self.page_format == "fp16" else PAGE_SIZE
            bits += first * CODES[page_format_named(self.page_format).first.name]
            bits += (full - first) * CODES[self.page_format] + written * CODES["fp16"]
        return bits * self.numbers / 8

    @property
    def bits(self) -> float:
        """Held bits for each number."""
        return 8 * self.held / (self.numbers * sum(self.lengths))

    def grow(self, longest: int) -> Iterator[None]:
        """Append tokens to the only sequence, with a stop wherever a page begins and ends."""
        while self.lengths[0] < longest:
            self.write(self.sequences, 1)
            yield
            self.write(self.sequences, PAGE_SIZE - 1)
            yield

    def write(self, sequences: list[PagedSequence], count: int) -> None:
        """Append so many tokens to these sequences, as a batch."""
        tokens = mx.zeros((len(sequences), 1, count, HEAD), dtype=mx.float16)
        for layer in range(self.pool.num_layers):
            cache = PagedKVCache(self.pool, layer, sequences)
            window = self.pool.windows.get(layer)
            mask = cache.make_mask(count, window_size=window.size if window else None)
            keys, values = cache.update_and_fetch(tokens, tokens)
            mx.eval(paged_attention(tokens, keys, values, cache, 1.0, mask))
        del keys, values, mask
        self.most_held = max(self.most_held, self.held)


def by_length(model: str, page_format: str, count: int, tokens: int) -> dict[str, float]:
    rows = Rows(page_format, None, [tokens] * count, MODELS[model])
    rows.write(rows.sequences, 1)
    peak = 8 * rows.most_held / (rows.numbers * sum(rows.lengths))
    over = rows.bits / CODES[page_format] - 1
    about = {"rows": count, "tokens": tokens + 1}
    return about | {"bits": rows.bits, "over_codes": over, "peak_bits": peak}


def one_row(page_format: str, max_bytes: str | None) -> list[dict[str, float]]:
    rows = Rows(page_format, max_bytes, [SHORTEST])
    return [
        {"tokens": rows.lengths[0], "bits": rows.bits, "over_needed": rows.held / rows.needed}
        for _ in rows.grow(LONGEST)
    ]


def summary(curves: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Worst and mean of the curves of all budgets; a page's lengths count alike."""
    points = [point for curve in curves.values() for point in curve]
    to_32k = [each["bits"] for each in points if each["tokens"] <= HEADLINE]
    from_4k = [each["bits"] for each in points if each["tokens"] > 1 << 12]
    over = [each["over_needed"] for each in points]
    return {
        "worst_over_needed": max(over),
        "mean_over_needed": statistics.mean(over),
        "worst_bits_to_32k": max(to_32k),
        "mean_bits_to_32k": statistics.mean(to_32k),
        "worst_bits_from_4k": max(from_4k),
    }


def of_mlx_lm() -> list[dict[str, float]]:
    """The curve of one row with mlx-lm's caches, by their `nbytes`."""
    cache, curve = KVCache(), []
    steps = [SHORTEST, *[1, PAGE_SIZE - 1] * ((LONGEST - SHORTEST) // PAGE_SIZE)]
    for count in steps:
        mx.eval(cache.update_and_fetch(*[mx.zeros((1, 1, count, HEAD), dtype=mx.float16)] * 2))
        bits = 8 * cache.nbytes / (2 * HEAD * cache.offset)
        curve.append({"tokens": cache.offset, "bits": bits, "over_needed": bits / CODES["fp16"]})
    return curve[1:]


def main() -> None:
    figures: dict[str, Any] = {"shortest": SHORTEST, "longest": LONGEST, "headline": HEADLINE}
    figures["by_length"] = {
        model: {
            name: [by_length(model, name, rows, tokens) for rows in ROWS for tokens in LENGTHS]
            for name in CODES
        }
        for model in MODELS
    }
    alone = {name: {at: one_row(name, each) for at, each in BUDGETS.items()} for name in CODES}
    curves = {"mlx-lm": of_mlx_lm()} | {name: alone[name]["1GB"] for name in CODES}
    figures["one_row"] = {"mlx-lm": summary({"": curves["mlx-lm"]})}
    figures["one_row"] |= {name: summary(curves) for name, curves in alone.items()}
    figures["curves"] = {name: in_columns(curve) for name, curve in curves.items()}
    draw(figures["curves"])
    write_result("held_bytes", figures)


def in_columns(curve: list[dict[str, float]]) -> dict[str, list[float]]:
    """What the picture needs of a curve, as few lines of text."""
    return {
        "tokens": [each["tokens"] for each in curve],
        "bits": [round(each["bits"], 3) for each in curve],
    }


def draw(curves: dict[str, dict[str, list[float]]]) -> None:
    """The picture of README: bits a number by length."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=True):
        # Wider, or pages of 16 bits would hide it: both hold nearly the same.
        width = 4 if name == "mlx-lm" else 1
        axes.plot(curve["tokens"], curve["bits"], label=name, color=colour, linewidth=width)
    axes.set_xscale("log", base=2)
    axes.set_xticks([SHORTEST << at for at in range(7)], [f"{1 << at}K" for at in range(7)])
    axes.set_ylim(0)
    axes.set_xlabel("tokens of one sequence")
    axes.set_ylabel("bits held for each number")
    axes.legend(loc="upper right", ncols=len(curves))
    with rc_context({"svg.hashsalt": "paged_kv", "svg.fonttype": "none"}):
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
