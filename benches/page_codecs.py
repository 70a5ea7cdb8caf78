"""What codecs for full pages would cost: python -m benches.page_codecs

A simulation, to decide which number formats are worth kernels. Models run in float32 on text that
they were not trained on (`heldout_text`), in steps of 128 tokens. A cache holds plain arrays. When
a page of 256 tokens is full and the next one begins, its numbers are rounded as the codec would
round them; the page that is being written keeps its numbers. Layers with a sliding window keep
theirs too, except in rows that say "windows too".

Codes of b bits are those of `Quantised`: 32 numbers share a scale, which is refitted to the codes,
so a number takes b + 0.5 bits. Pages are in the basis of `rotation`. "By channel" means that the
32 numbers are those of a channel in 32 tokens, not those of a token in 32 channels; such keys are
not rotated.

text        perplexity on contexts of 2,048 and 4,096 tokens, of one file each. `loss_percent` is
            how much larger it is than with exact pages, with the standard error over contexts.
outliers    the same for stdlib-llama with some channels of keys and values 16 times as large, see
            `quantised_quality`.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from benches.heldout_text import contexts, model_in_float32
from benches.quantised_quality import (
    OUTLIER,
    all_log_probs,
    compared,
    divergence,
    nats,
    plant_outliers,
)
from benches.results_file import write_result
from paged_kv.kernels.pages.number_format import GROUP, LEAST, MOST, rotate
from paged_kv.kernels.pages.page_format import PAGE_SIZE

CONTEXTS = {2048: 8, 4096: 4}
MODELS = ("stdlib-llama", "stdlib-gemma3")

Codec = Callable[[mx.array], mx.array]
Figures = dict[str, Any]


def rounded(numbers: mx.array, bits: int) -> mx.array:
    """Numbers [..., multiple of 32] after a round trip through codes of `bits` bits."""
    groups = numbers.reshape(*numbers.shape[:-1], -1, GROUP)
    most = 2 ** (bits - 1)
    if bits == 8:
        scale = mx.max(mx.abs(groups), axis=-1, keepdims=True) / 127
        codes = mx.clip(mx.floor(groups * inverse(scale) + 0.5), -127, 127)
    else:
        at = mx.argmax(mx.abs(groups), axis=-1, keepdims=True)
        first = mx.take_along_axis(groups, at, axis=-1) / -most
        codes = mx.clip(mx.floor(groups * inverse(first) + 0.5), -most, most - 1)
        squares = mx.sum(codes * codes, axis=-1, keepdims=True)
        scale = mx.sum(codes * groups, axis=-1, keepdims=True) * inverse(squares)
    scale = mx.clip(scale, -MOST, MOST).astype(mx.float16).astype(mx.float32)
    return (codes * scale).reshape(numbers.shape)


def inverse(numbers: mx.array) -> mx.array:
    return mx.where(mx.abs(numbers) < LEAST, 0, 1 / numbers)


def by_token(bits: int) -> Codec:
    return lambda page: rotate(rounded(rotate(page), bits))


def by_channel(bits: int) -> Codec:
    return lambda page: rounded(page.swapaxes(-1, -2), bits).swapaxes(-1, -2)


@dataclass(frozen=True)
class PageCodecs:
    """How full pages are rounded.

    Attributes:
        keys, values: take and return a page [B, heads, 256, dim].
        bits: mean bits of a number.
        at_once: whether a token is rounded as it is written, not when its page is full.
        exact_pages: how many pages at the head keep their numbers.
        windows: whether layers with a sliding window are rounded too.
    """

    keys: Codec
    values: Codec
    bits: float
    at_once: bool = False
    exact_pages: int = 0
    windows: bool = False


def same(bits: int, **how: Any) -> PageCodecs:
    return PageCodecs(by_token(bits), by_token(bits), bits + 0.5, **how)


def channel_keys(bits: int) -> PageCodecs:
    return PageCodecs(by_channel(bits), by_token(bits), bits + 0.5)


CODECS: dict[str, PageCodecs] = {
    "q8": same(8),
    "q4, at once": same(4, at_once=True),
    "q4": same(4),
    "q4, windows too": same(4, windows=True),
    "q4, first page exact": same(4, exact_pages=1),
    "q4, keys by channel": channel_keys(4),
    "q4/q3": PageCodecs(by_token(4), by_token(3), 4.0),
    "q3": same(3),
    "q3, windows too": same(3, windows=True),
    "q3, first page exact": same(3, exact_pages=1),
    "q3, keys by channel": channel_keys(3),
    "q2": same(2),
    "q2, keys by channel": channel_keys(2),
}


def rounded_cache(codecs: PageCodecs) -> Any:
    """A cache of plain arrays that rounds full pages."""
    cache: Any = KVCache()
    take, rounded_pages = cache.update_and_fetch, codecs.exact_pages

    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        nonlocal rounded_pages
        if codecs.at_once:
            return take(codecs.keys(keys), codecs.values(values))
        while (rounded_pages + 1) * PAGE_SIZE <= cache.offset:
            page = slice(rounded_pages * PAGE_SIZE, (rounded_pages + 1) * PAGE_SIZE)
            cache.keys[..., page, :] = codecs.keys(cache.keys[..., page, :])
            cache.values[..., page, :] = codecs.values(cache.values[..., page, :])
            rounded_pages += 1
        return take(keys, values)

    cache.update_and_fetch = update_and_fetch
    return cache


def caches(model: Any, codecs: PageCodecs) -> list[Any]:
    """Caches that round full pages; layers with a window keep mlx-lm's unless they are rounded."""
    return [
        rounded_cache(codecs) if isinstance(each, KVCache) or codecs.windows else each
        for each in make_prompt_cache(model)
    ]


def losses(name: str, tokens: int, has_outliers: bool) -> Figures:
    """Of each codec, compared with mlx-lm's own caches."""
    model, tokenizer = model_in_float32(name)
    if has_outliers:
        for layer in model.layers:
            plant_outliers(layer.self_attn)
    texts = contexts(tokenizer, tokens, CONTEXTS[tokens])
    exact = [all_log_probs(model, make_prompt_cache(model), text) for text in texts]
    reference = [nats(each, text[1:]) for each, text in zip(exact, texts, strict=True)]
    rows: Figures = {}
    for codec, codecs in CODECS.items():
        predicted = [all_log_probs(model, caches(model, codecs), text) for text in texts]
        found = [nats(each, text[1:]) for each, text in zip(predicted, texts, strict=True)]
        rows[codec] = {
            "bits": codecs.bits,
            **compared(found, reference),
            "kl_nats": mean(map(divergence, predicted, exact)),
        }
        print(name, tokens, has_outliers, codec, rows[codec], flush=True)
    return rows


PARTS = {
    **{f"{name}, {tokens}": (name, tokens, False) for name in MODELS for tokens in CONTEXTS},
    **{f"stdlib-llama, {tokens}, outliers": ("stdlib-llama", tokens, True) for tokens in CONTEXTS},
}


def main() -> None:
    parts: dict[str, Figures] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as processes:
        running = {processes.submit(losses, *each): name for name, each in PARTS.items()}
        for done in as_completed(running):
            parts[running[done]] = done.result()
            ordered = {name: parts[name] for name in PARTS if name in parts}
            figures = {
                "blas": BLAS,
                "times_larger": OUTLIER,
                "contexts": CONTEXTS,
                "parts": ordered,
            }
            print("written to", write_result("page_codecs", figures).name, flush=True)


if __name__ == "__main__":
    main()
