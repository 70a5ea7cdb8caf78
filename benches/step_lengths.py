"""How much shows of the lengths of steps: python -m benches.step_lengths

Models in float32 read texts that they were not trained on (`benches.models`) in one step, and in
steps of other lengths. What attention sees does not depend on that: a token's own page in 16 bits,
and earlier pages in their format. But a matrix product of other shape sums in another order, so
the model itself computes keys and values whose last bits differ. A number that lies at the border
of two codes may then get the other one, and so may a scale between two float16 numbers.

logits    the largest difference of any logit, in standard deviations of that token's logits
likeliest tokens with another likeliest successor
numbers   the largest difference of keys or values, in standard deviations of that layer's
codes     codes that differ, of all codes of full pages
scales    scales that differ, of all scales of full pages: they are rounded to float16
given     as `logits`, where layers are given the keys and values of the one step: the same codes
"""

from benches.openblas import BLAS

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from benches.models import MODELS, contexts, load_model
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.number_format import NumberFormat, unpacked
from paged_kv.kernels.pages.page_format import PAGE_SIZE, page_format_named

TOKENS, CONTEXTS = 1100, 4
STEPS = (1, 7, 64, 200, 512)
FORMATS = ("fp16", "q8", "q4")

Floats = npt.NDArray[np.float32]
Pair = tuple[mx.array, mx.array]


class Recorder:
    """A layer's cache that records what the model writes, or writes what another one recorded."""

    def __init__(self, cache: Any, given: Pair | None) -> None:
        self._cache = cache
        self._given = given
        self._written: list[Pair] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if self._given is not None:
            at = slice(self._cache.offset, self._cache.offset + keys.shape[2])
            keys, values = (each[:, :, at] for each in self._given)
        self._written.append((keys, values))
        return self._cache.update_and_fetch(keys, values)

    @property
    def written(self) -> Pair:
        """All keys, and all values, [1, heads, tokens, dim]."""
        keys, values = zip(*self._written, strict=True)
        return mx.concatenate(list(keys), axis=2), mx.concatenate(list(values), axis=2)


@dataclass(frozen=True)
class Run:
    """A text that was read.

    Attributes:
        logits: [tokens, vocabulary].
        written: the keys and values of each layer.
        quantised: the layers whose full pages are.
    """

    logits: Floats
    written: list[Pair]
    quantised: list[int]


def read(
    model: Any, text: list[int], page_format: str, step: int, given: list[Pair] | None = None
) -> Run:
    factory = PagedCacheFactory(model, page_format=page_format)
    layers = factory.make_cache()
    caches = [
        Recorder(cache, given[layer] if given else None) for layer, cache in enumerate(layers)
    ]
    logits = []
    for start in range(0, len(text), step):
        logits.append(model(mx.array([text[start : start + step]]), cache=caches)[0])
        mx.eval(logits[-1])
    quantised = [layer for layer in range(len(layers)) if layer not in factory.pool.windows]
    return Run(np.array(mx.concatenate(logits)), [each.written for each in caches], quantised)


def difference(run: Run, other: Run) -> float:
    """The largest difference of logits, in standard deviations of a token's."""
    return float((np.abs(run.logits - other.logits) / other.logits.std(-1, keepdims=True)).max())


def compared(run: Run, whole: Run, given: Run, page_format: str) -> dict[str, float]:
    likeliest = run.logits.argmax(-1) != whole.logits.argmax(-1)
    figures = {
        "logits": difference(run, whole),
        "given": difference(given, whole),
        "likeliest": int(likeliest.sum()),
        "numbers": max(
            float(mx.max(mx.abs(mine - theirs)) / mx.std(theirs))
            for mine, theirs in _pairs(run, whole, range(len(whole.written)))
        ),
    }
    return figures if page_format == "fp16" else figures | codes(run, whole, page_format)


def codes(run: Run, whole: Run, page_format: str) -> dict[str, float]:
    """The codes and scales of full pages that differ."""
    full = len(whole.logits) // PAGE_SIZE * PAGE_SIZE
    found: dict[str, float] = dict.fromkeys(("codes", "of_codes", "scales", "of_scales"), 0)
    held = page_format_named(page_format)
    for (mine, theirs), number_format in zip(
        _pairs(run, whole, whole.quantised), cycle((held.keys, held.values))
    ):
        for first in range(0, full, PAGE_SIZE):
            page = np.s_[:, :, first : first + PAGE_SIZE]
            (my_codes, my_scales), (codes, scales) = (
                encoded(numbers[page], number_format) for numbers in (mine, theirs)
            )
            found["codes"] += int((my_codes != codes).sum())
            found["of_codes"] += codes.size
            found["scales"] += int((my_scales != scales).sum())
            found["of_scales"] += scales.size
    return found


def encoded(
    numbers: mx.array, number_format: NumberFormat
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """Codes [..., dim], and scales, of a page's keys or values."""
    bits = number_format.encoding(numbers.dtype).bits
    words, scales, *_ = number_format.encode(numbers)
    fifths = numbers.shape[-1] // 16 if bits == 5 else 0
    codes = words.view(mx.uint8) if bits == 8 else unpacked(words, scales[..., :fifths])
    return np.array(codes.view(mx.uint8)), np.array(scales[..., fifths:])


def _pairs(run: Run, other: Run, layers: Iterable[int]) -> Iterable[tuple[mx.array, mx.array]]:
    for layer in layers:
        yield from zip(run.written[layer], other.written[layer], strict=True)


def of_model(name: str) -> dict[str, dict[int, dict[str, float]]]:
    model, tokenizer = load_model(name)
    texts = [each[:TOKENS] for each in contexts(tokenizer, TOKENS, CONTEXTS)]
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for page_format in FORMATS:
        wholes = [read(model, text, page_format, TOKENS) for text in texts]
        rows[page_format] = {}
        for step in STEPS:
            each = [
                compared(
                    read(model, text, page_format, step),
                    whole,
                    read(model, text, page_format, step, whole.written),
                    page_format,
                )
                for text, whole in zip(texts, wholes, strict=True)
            ]
            rows[page_format][step] = over_texts(each)
            print(name, page_format, step, rows[page_format][step], flush=True)
    return rows


def over_texts(figures: list[dict[str, float]]) -> dict[str, float]:
    """Sums of counts, and the largest of the other figures."""
    sums = ("likeliest", "codes", "of_codes", "scales", "of_scales")
    return {
        name: (sum if name in sums else max)(each[name] for each in figures) for name in figures[0]
    }


def main() -> None:
    found = dict(finished(of_model, [(name,) for name in MODELS]))
    rows = {name: found[name,] for name in MODELS}
    figures = {"tokens": TOKENS, "contexts": CONTEXTS, "blas": BLAS, "rows": rows}
    write_result("step_lengths", figures)


if __name__ == "__main__":
    main()
