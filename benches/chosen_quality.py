"""What real models lose by reading chosen tokens: python -m benches.chosen_quality [NAME ...]

Models compute in float32. They read 7,168 tokens of a text exactly, then 256 one by one, in layers
without a window with no more than 1/2, 1/4 or 1/8 of the context. Rows are of one model, over the
texts of `benches.real_model_quality`:

    loss    how much larger the perplexity of the 256 is than with exact attention, in percent, and
            its standard error over blocks of 64 tokens:
                summaries      the runs that paged_kv chooses
                true weights   those that have the most weight: the best that runs can do
                latest         the first run and the latest ones
                q4             the first again, as decoded on pages of that format: what it loses
                               beside q4 pages that are read whole
    mass    the share of attention's weight that 1/4 of the tokens has, by layer, for the first two
    recall  of the codes and tool calls of `benches.real_recall`, ten of each in a text, those that
            greedy decoding gives behind 7,168 tokens

The first three are computed by masks, with the functions that choose; `decode_differs` is by how
many nats a token paged_kv's own decode differs from that at 1/4, at most and in the mean.
"""

from benches.openblas import BLAS

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, stdev
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from benches.models import load_model
from benches.real_model_quality import KINDS
from benches.real_model_quality import text_of as prose_of
from benches.real_models.folders import MODELS
from benches.real_recall import text_of as recall_text
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.choice import chosen_runs, run_scores
from paged_kv.kernels.pages.page_format import PAGE_SIZE, RUN_TOKENS, summaries_of

BEFORE, MEASURED, STEP, QUERIES, BLOCK = 7168, 256, 256, 32, 64
SHARES = (2, 4, 8)
MASS_SHARE = 4
DEPTHS, TEXTS = 10, 1

Figures = dict[str, Any]
Scores = Callable[[mx.array, mx.array, float], mx.array]


class Context(NamedTuple):
    """A model that has read the first tokens of a text, and all tokens."""

    model: Any
    cache: list[Any]
    tokens: list[int]


def of_summaries(queries: mx.array, keys: mx.array, scale: float) -> mx.array:
    """Scores of queries [Q, heads, 1, dim] for each 32 keys of [1, kv_heads, T, dim]."""
    return run_scores(queries, summaries_of(_whole_pages(keys)), scale)


def of_true_weights(queries: mx.array, keys: mx.array, scale: float) -> mx.array:
    logits = _logits(queries, _whole_pages(keys), scale)
    return mx.logsumexp(mx.unflatten(logits, -1, (-1, RUN_TOKENS)), axis=-1)


def of_the_latest(queries: mx.array, keys: mx.array, scale: float) -> mx.array:
    group = queries.shape[1] // keys.shape[1]
    count = _whole_pages(keys).shape[2] // RUN_TOKENS
    return mx.broadcast_to(mx.arange(count) * 1.0, (len(queries), keys.shape[1], group, count))


CHOICES: dict[str, Scores] = {
    "summaries": of_summaries,
    "true weights": of_true_weights,
    "latest": of_the_latest,
}


def _whole_pages(keys: mx.array) -> mx.array:
    return mx.pad(keys, [(0, 0), (0, 0), (0, -keys.shape[2] % PAGE_SIZE), (0, 0)])


def _logits(queries: mx.array, keys: mx.array, scale: float) -> mx.array:
    """[Q, kv_heads, G, T]."""
    by_kv_head = mx.unflatten(queries[:, :, 0] * scale, 1, (keys.shape[1], -1))
    return by_kv_head @ keys.swapaxes(-1, -2)


class Choosing:
    """Attention of several queries that each read no more than so many tokens, in the place of
    mlx-lm's in the modules of a model.

    Attributes:
        mass: of each call in a layer that chooses, the mean share of attention's weight that is
            read.
    """

    def __init__(self, model: Any, scores: Scores, read_tokens: int) -> None:
        self._scores, self._read_tokens = scores, read_tokens
        self._module = vars(sys.modules[type(model).__module__])
        self._stock = self._module["scaled_dot_product_attention"]
        self.mass: list[float] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        self._module["scaled_dot_product_attention"] = self._attend
        try:
            yield
        finally:
            self._module["scaled_dot_product_attention"] = self._stock

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **options: Any
    ) -> mx.array:
        if type(cache) is not KVCache:
            found: mx.array = self._stock(queries, keys, values, cache=cache, **options)
            return found
        asked = queries.transpose(2, 1, 0, 3)
        count, length, scale = len(asked), keys.shape[2], options["scale"]
        lengths = mx.arange(length - count + 1, length + 1)
        read = self._read_tokens
        runs = chosen_runs(self._scores(asked, keys, scale), lengths, read)
        run_of = mx.arange(length) // RUN_TOKENS
        past = mx.arange(length) < lengths[:, None, None, None]
        seen = (run_of == runs[..., None]).any(axis=2)[:, :, None] & past
        logits = _logits(asked, keys, scale)
        every = mx.softmax(mx.where(past, logits, -mx.inf), axis=-1)
        mass: Any = (every * seen).sum(axis=-1).mean()
        self.mass.append(mass.item())
        weights = mx.softmax(mx.where(seen, logits, -mx.inf), axis=-1)
        output = mx.flatten(weights @ values, 1, 2)[:, :, None]
        return output.transpose(2, 1, 0, 3)


def read_by(factory: PagedCacheFactory, model: Any, tokens: list[int]) -> list[Any]:
    """A cache of the tokens."""
    cache = factory.make_cache()
    for start in range(0, len(tokens), STEP):
        model.model(mx.array([tokens[start : start + STEP]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


def stock_caches(model: Any, paged: list[Any]) -> list[Any]:
    """mlx-lm's caches of the same tokens."""
    caches = make_prompt_cache(model)
    for stock, own in zip(caches, paged, strict=True):
        most = stock.max_size if isinstance(stock, RotatingKVCache) else own.offset
        stock.keys, stock.values = own.keys[:, :, -most:] * 1, own.values[:, :, -most:] * 1
        stock.offset = own.offset
        if isinstance(stock, RotatingKVCache):
            stock._idx = stock.keys.shape[2]
        mx.eval(stock.keys, stock.values)
    return caches


def nats_of(context: Context, queries: int) -> list[float]:
    """The nats of each token behind what was read, so many queries in a step."""
    model, cache, tokens = context
    cache, nats = copy.deepcopy(cache), []
    for start in range(BEFORE, len(tokens) - 1, queries):
        end = min(start + queries, len(tokens) - 1)
        logits = model(mx.array([tokens[start:end]]), cache=cache)[0]
        following = mx.array(tokens[start + 1 : end + 1])[:, None]
        own: Any = mx.logsumexp(logits, -1) - mx.take_along_axis(logits, following, -1)[:, 0]
        nats += own.tolist()
    return nats


def losses_of(name: str, kind: str) -> Figures:
    """The nats of one text, by choice and share, and the mass."""
    model, tokenizer = load_model(name)
    tokens = prose_of(kind, tokenizer)[: BEFORE + MEASURED + 1]
    assert len(tokens) == BEFORE + MEASURED + 1, f"{kind} is too short"
    nats: dict[str, list[float]] = {}
    mass: dict[str, list[float]] = {}
    read_tokens = BEFORE // MASS_SHARE
    factory = PagedCacheFactory(model, read_tokens=read_tokens, max_bytes="4GB")
    own = read_by(factory, model, tokens[:BEFORE])
    nats["decoded"] = nats_of(Context(model, own, tokens), 1)
    stock = Context(model, stock_caches(model, own), tokens)
    nats["exact"] = nats_of(stock, QUERIES)
    for choice, scores in CHOICES.items():
        for share in SHARES:
            choosing = Choosing(model, scores, BEFORE // share)
            with choosing.installed():
                nats[f"{choice} {share}"] = nats_of(stock, QUERIES)
            if share == MASS_SHARE:
                layers = sum(type(each) is KVCache for each in stock.cache)
                mass[choice] = [mean(choosing.mass[at::layers]) for at in range(layers)]
    q4 = PagedCacheFactory(model, read_tokens=read_tokens, page_format="q4", max_bytes="4GB")
    of_q4 = Context(model, read_by(q4, model, tokens[:BEFORE]), tokens)
    # Steps of several tokens read all.
    nats["q4 exact"], nats["q4 decoded"] = nats_of(of_q4, QUERIES), nats_of(of_q4, 1)
    return {"text": kind, "nats": nats, "mass": mass}


def recalled(name: str, number: int) -> dict[str, dict[str, list[bool]]]:
    """By share and task, whether each answer of a text is given."""
    model, tokenizer = load_model(name)
    text, questions = recall_text(tokenizer, BEFORE, number, hidden=DEPTHS)
    found: dict[str, dict[str, list[bool]]] = {}
    for share in (1, *SHARES):
        factory = PagedCacheFactory(model, read_tokens=BEFORE // share + 512 * (share == 1))
        cache = read_by(factory, model, text)
        answers = found[str(share)] = {"needle": [], "call": []}
        for question in questions:
            answers[question.task].append(_is_given(model, copy.deepcopy(cache), question))
    return found


def _is_given(model: Any, cache: list[Any], question: Any) -> bool:
    """Whether decoding token by token gives the answer."""
    tokens = question.asked[:-1]
    if tokens:
        model.model(mx.array([tokens]), cache=cache)
    token = question.asked[-1]
    for wanted in question.answer:
        logits: Any = model(mx.array([[token]]), cache=cache)
        token = mx.argmax(logits[0, -1]).item()
        if token != wanted:
            return False
    return True


def _loss(parts: list[Figures], label: str, exact: str) -> dict[str, float]:
    """The loss of perplexity over texts, in percent."""
    blocks = [
        mean(own[at : at + BLOCK]) - mean(others[at : at + BLOCK])
        for part in parts
        for own, others in [(part["nats"][label], part["nats"][exact])]
        for at in range(0, MEASURED, BLOCK)
    ]
    return {
        "loss_percent": 100 * math.expm1(mean(blocks)),
        "standard_error_percent": 100 * stdev(blocks) / math.sqrt(len(blocks)),
    }


def _differs(parts: list[Figures]) -> dict[str, float]:
    label = f"summaries {MASS_SHARE}"
    pairs = [
        pair
        for part in parts
        for pair in zip(part["nats"]["decoded"], part["nats"][label], strict=True)
    ]
    differences = [abs(own - other) for own, other in pairs]
    return {"most": max(differences), "mean": mean(differences)}


def figures_of(losses: dict[str, list[Figures]], recall: dict[str, list[Figures]]) -> Figures:
    """What the results file holds of what is done."""
    compared = [(each, share, f"{each} {share}", "exact") for each in CHOICES for share in SHARES]
    compared.append(("q4", MASS_SHARE, "q4 decoded", "q4 exact"))
    loss = [
        {"model": name, "choice": choice, "share": share, **_loss(parts, label, exact)}
        for name, parts in losses.items()
        for choice, share, label, exact in compared
    ]
    mass = [
        {
            "model": name,
            "choice": choice,
            "layers": [
                mean(at) for at in zip(*[part["mass"][choice] for part in parts], strict=True)
            ],
        }
        for name, parts in losses.items()
        for choice in CHOICES
    ]
    found = [
        {
            "model": name,
            "task": task,
            "share": int(share),
            "answers": sum(len(part[share][task]) for part in parts),
            "right": sum(sum(part[share][task]) for part in parts),
        }
        for name, parts in recall.items()
        for task in ("needle", "call")
        for share in parts[0]
    ]
    return {
        "blas": BLAS,
        "before": BEFORE,
        "measured": MEASURED,
        "texts": sorted({part["text"] for parts in losses.values() for part in parts}),
        "loss": loss,
        "decode_differs": {name: _differs(parts) for name, parts in losses.items()},
        "mass": mass,
        "recall": found,
    }


def work(name: str, kind: str | int) -> Figures:
    return losses_of(name, kind) if isinstance(kind, str) else recalled(name, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what choosing tokens loses.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    losses: dict[str, list[Figures]] = {}
    recall: dict[str, list[Figures]] = {}
    parts: list[str | int] = [*KINDS, *range(TEXTS)]
    calls = [(name, part) for part in parts for name in arguments.names or MODELS]
    for (name, kind), part in finished(work, calls):
        (losses if isinstance(kind, str) else recall).setdefault(name, []).append(part)
        path = write_result("chosen_quality", figures_of(losses, recall))
        print(f"{name}, {kind}: {path.name}", flush=True)


if __name__ == "__main__":
    main()
