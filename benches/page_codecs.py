"""What codecs of full pages lose in real models: python -m benches.page_codecs [NAME ...]

A simulation, to decide which number formats are worth kernels. Models of `benches.real_models` read
the first 2,048 tokens of each text of `real_model_quality` in float32, in steps of 128. A cache
holds plain arrays. When a page of 256 tokens is full and the next one begins, its numbers are
rounded as the codec would round them; the page that is written keeps its numbers. Layers with a
sliding window keep theirs too.

Codes, scales, centres and the rotation are those of `number_format`, or differ from them as a
codec's name says. Of all tokens every fourth is compared with exact pages:

    bits                     of a number in 8,192 tokens of full pages
    loss_percent             how much larger the perplexity is, and its
    standard_error_percent   standard error over blocks of 512 tokens
    kl_mean                  nats a token by which the distributions diverge
    centre_percent           beside the codecs: what share of the energy of keys, and of values, is
                             that of the centres of their pages

The plot shows bits and divergence: docs/pictures/codecs.svg.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from matplotlib import rc_context
from matplotlib.figure import Figure
from mlx_lm.models.cache import KVCache, make_prompt_cache

from benches.heldout_text import model_in_float32
from benches.real_model_quality import KINDS, Losses, row_of, side_by_side, text_of
from benches.real_models.folders import MODELS
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv.kernels.pages.number_format import GROUP, MOST, Quantised, centre, rotate
from paged_kv.kernels.pages.page_format import PAGE_SIZE

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "codecs.svg"
TOKENS, EVERY = 2048, 4
PAGES = 32  # of 8,192 tokens
CENTRE_BITS = 16 / PAGE_SIZE

Figures = dict[str, Any]
Round = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Codec:
    """How the keys, or the values, of a full page [B, heads, 256, dim] are rounded.

    Attributes:
        rounded: takes and returns a page.
        bits: of a number.
    """

    rounded: Round
    bits: float


def held(number_format: Quantised) -> Codec:
    """As pages hold them."""
    bits = number_format.bits + 0.5 + CENTRE_BITS * number_format.is_centred
    return Codec(lambda page: number_format.decode(number_format.encode(page), page.dtype), bits)


def even(bits: int, group: int = GROUP) -> Codec:
    """Codes in even steps, with a scale that is refitted to them."""
    most = 2 ** (bits - 1)

    def rounded(numbers: mx.array) -> mx.array:
        groups = mx.unflatten(numbers, -1, (-1, group))
        largest = mx.take_along_axis(groups, mx.argmax(mx.abs(groups), -1, keepdims=True), -1)
        codes = mx.clip(mx.floor(groups * _inverse(largest / -most) + 0.5), -most, most - 1)
        return _refitted(codes, groups)

    return Codec(rounded, bits + 16 / group)


def gaussian() -> Codec:
    """Codes that are quantiles of a Gaussian, as those of NF4 (Dettmers et al., "QLoRA", 2023)."""
    levels = [NormalDist().inv_cdf((2 * each + 1) / 32) for each in range(16)]
    table = mx.array([each / levels[-1] for each in levels])
    borders = (table[1:] + table[:-1]) / 2

    def rounded(numbers: mx.array) -> mx.array:
        groups = mx.unflatten(numbers, -1, (-1, GROUP))
        units = groups * _inverse(mx.max(mx.abs(groups), -1, keepdims=True))
        codes = table[mx.sum(units[..., None] > borders, -1)]
        return _refitted(codes, groups)

    return Codec(rounded, 4.5)


def _refitted(codes: mx.array, groups: mx.array) -> mx.array:
    products = mx.sum(codes * groups, -1, keepdims=True)
    scales = products * _inverse(mx.sum(codes * codes, -1, keepdims=True))
    scales = mx.clip(scales, -MOST, MOST).astype(mx.float16).astype(mx.float32)
    return mx.flatten(codes * scales, -2)


def _inverse(numbers: mx.array) -> mx.array:
    return mx.where(numbers == 0, 0, 1 / numbers)


def rotated(codec: Codec) -> Codec:
    return replace(codec, rounded=lambda page: rotate(codec.rounded(rotate(page))))


def centred(codec: Codec) -> Codec:
    def rounded(page: mx.array) -> mx.array:
        common = centre(page).astype(mx.float16).astype(mx.float32)
        return codec.rounded(page - common) + common

    return Codec(rounded, codec.bits + CENTRE_BITS)


def by_channel(codec: Codec) -> Codec:
    """Numbers of a channel in several tokens share a scale (Liu et al., "KIVI", 2024)."""
    return replace(
        codec, rounded=lambda page: codec.rounded(page.swapaxes(-1, -2)).swapaxes(-1, -2)
    )


def largest_channels(codec: Codec, share: int, larger: Codec) -> Codec:
    """One of `share` channels, those with most energy, have another codec."""

    def rounded(page: mx.array) -> mx.array:
        energy = mx.sum(page * page, axis=-2, keepdims=True)
        count = page.shape[-1] // share
        is_large = energy >= mx.sort(energy, axis=-1)[..., -count : page.shape[-1] - count + 1]
        others = codec.rounded(mx.where(is_large, 0, page))
        return mx.where(is_large, larger.rounded(page), others)

    return Codec(rounded, codec.bits + larger.bits / share)


@dataclass(frozen=True)
class PageCodec:
    """How full pages are rounded: `first` are the codecs of the first page, if they differ."""

    keys: Codec
    values: Codec
    first: tuple[Codec, Codec] | None = None
    outer_layers_exact: bool = False

    def of_page(self, number: int) -> tuple[Codec, Codec]:
        return self.first if self.first and number == 0 else (self.keys, self.values)

    def bits(self, layers: int) -> float:
        """Of a number in full pages of so many layers."""
        first, others = (mean(each.bits for each in self.of_page(page)) for page in (0, 1))
        bits = (first + (PAGES - 1) * others) / PAGES
        exact = min(2, layers) * self.outer_layers_exact
        return (16 * exact + bits * (layers - exact)) / layers


Q8 = held(Quantised(8))
PLAIN, CENTRED = (held(Quantised(4, is_centred=each)) for each in (False, True))
FIRST = Q8, Q8
Q4 = PageCodec(CENTRED, PLAIN, FIRST)
CODECS = {
    "q8": PageCodec(Q8, Q8),
    "q8/q4": PageCodec(Q8, PLAIN, FIRST),
    "q8/q4, first page too": PageCodec(Q8, PLAIN),
    "q4": Q4,
    "q4, first page too": replace(Q4, first=None),
    "q4, keys without centres": replace(Q4, keys=PLAIN),
    "q4, neither": PageCodec(PLAIN, PLAIN),
    "q4, values with centres": replace(Q4, values=CENTRED),
    "q4, first page exact": replace(Q4, first=(Codec(lambda page: page, 16.0),) * 2),
    "q4, outer layers exact": replace(Q4, outer_layers_exact=True),
    "q4, not rotated": PageCodec(centred(even(4)), even(4), FIRST),
    "q4, keys by channel": replace(Q4, keys=centred(by_channel(even(4)))),
    "q4, Gaussian codes": PageCodec(centred(rotated(gaussian())), rotated(gaussian()), FIRST),
    "q4, scales of 64": PageCodec(centred(rotated(even(4, 64))), rotated(even(4, 64)), FIRST),
    "q4, large key channels q8": replace(
        Q4, keys=centred(largest_channels(rotated(even(4)), 16, by_channel(even(8))))
    ),
    "q5/q4": replace(Q4, keys=centred(rotated(even(5)))),
    "q4/q3": replace(Q4, values=rotated(even(3))),
    "q3": PageCodec(centred(rotated(even(3))), rotated(even(3)), FIRST),
}


def rounded_cache(codec: PageCodec, shares: list[list[float]]) -> Any:
    """A cache of plain arrays that rounds full pages. Notes the shares of their centres."""
    cache: Any = KVCache()
    take, rounded_pages = cache.update_and_fetch, 0

    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        nonlocal rounded_pages
        while (rounded_pages + 1) * PAGE_SIZE <= cache.offset:
            at = slice(rounded_pages * PAGE_SIZE, (rounded_pages + 1) * PAGE_SIZE)
            both = cache.keys[..., at, :], cache.values[..., at, :]
            shares.append([centre_share(each) for each in both])
            codecs = codec.of_page(rounded_pages)
            cache.keys[..., at, :], cache.values[..., at, :] = (
                each.rounded(page) for each, page in zip(codecs, both, strict=True)
            )
            rounded_pages += 1
        return take(keys, values)

    cache.update_and_fetch = update_and_fetch
    return cache


def centre_share(page: mx.array) -> float:
    common = centre(page)
    return float(PAGE_SIZE * mx.sum(common * common) / mx.sum(page * page))


def caches(model: Any, codec: PageCodec, shares: list[list[float]]) -> list[Any]:
    """Caches that round full pages; layers with a window keep mlx-lm's."""
    prompt_cache = make_prompt_cache(model)
    full = [at for at, each in enumerate(prompt_cache) if type(each) is KVCache]
    rounded = set(full[1:-1] if codec.outer_layers_exact else full)
    return [
        rounded_cache(codec, shares) if at in rounded else each
        for at, each in enumerate(prompt_cache)
    ]


Part = tuple[dict[str, Losses], list[list[float]], int]


def losses_of(name: str, kind: str) -> Part:
    """What each codec loses over a text; the shares of centres; the layers that are rounded."""
    model, tokenizer = model_in_float32(name)
    text = text_of(kind, tokenizer)[: TOKENS + 1]
    noted: dict[str, list[list[float]]] = {codec: [] for codec in CODECS}
    all_caches = {"fp16": make_prompt_cache(model)}
    all_caches |= {each: caches(model, codec, noted[each]) for each, codec in CODECS.items()}
    layers = sum(type(each) is KVCache for each in all_caches["fp16"])
    losses = side_by_side(model, all_caches, text, EVERY)
    return losses, noted["q8"], layers


def figures_of(done: dict[str, dict[str, Part]]) -> Figures:
    """What the results file holds of the texts that are done."""
    rows, centres = [], {}
    for model in [each for each in MODELS if each in done]:
        of_texts = {kind: part[0] for kind, part in done[model].items()}
        layers = next(iter(done[model].values()))[2]
        rows += [
            {"model": model, "bits": codec.bits(layers)} | row_of(of_texts, name, EVERY)
            for name, codec in CODECS.items()
        ]
        shares = [each for part in done[model].values() for each in part[1]]
        of_keys, of_values = (100 * mean(each) for each in zip(*shares, strict=True))
        centres[model] = {"keys": of_keys, "values": of_values}
    return {"blas": BLAS, "tokens": TOKENS, "centre_percent": centres, "rows": rows}


def draw(rows: list[Figures]) -> None:
    """Draw bits and divergence of each codec, a panel for each model."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "codecs", "font.size": 8}):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained", facecolor="white")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            own = [row for row in rows if row["model"] == name]
            axes.scatter([row["bits"] for row in own], [row["kl_mean"] for row in own], s=12)
            for row in own:
                axes.annotate(
                    row["cache"],
                    (row["bits"], row["kl_mean"]),
                    textcoords="offset points",
                    xytext=(4, 2),
                    fontsize=6,
                    weight="bold" if row["cache"] in {"q8", "q8/q4", "q4"} else "normal",
                )
            axes.set(title=name, yscale="log", xlabel="bits of a number", ylabel="nats a token")
        figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what codecs lose in real models.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    done: dict[str, dict[str, Part]] = {}
    calls = [(name, kind) for kind in KINDS for name in parser.parse_args().names or MODELS]
    for (name, kind), part in finished(losses_of, calls):
        done.setdefault(name, {})[kind] = part
        figures = figures_of(done)
        print(f"{name}, {kind}: {write_result('page_codecs', figures).name}", flush=True)
    draw(figures["rows"])
    print("drawn:", PICTURE.name)


if __name__ == "__main__":
    main()
