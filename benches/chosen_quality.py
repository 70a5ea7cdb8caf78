"""What real models lose by reading chosen tokens: python -m benches.chosen_quality [NAME ...]

Models compute in float32. They read 7,168 tokens of a text exactly, then 256 one by one, in layers
without a window with no more than 1/2, 1/4 or 1/8 of the context. Rows are of one model, over the
texts of `benches.real_model_quality`. `loss` is how much larger the perplexity of the 256 is than
with exact attention, in percent, with its standard error over blocks of 64 tokens:

    summaries      the runs that paged_kv chooses
    true weights   those that have the most weight: the best that runs can do
    latest         the first run and the latest ones
    q4             the first again, as decoded on pages of that format: what it loses beside q4
                   pages that are read whole

The first three are computed by masks, with the functions that choose.
"""

from benches.openblas import BLAS

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from benches.models import Caches, load_model, read
from benches.real_model_quality import KINDS, asked_models, loss_of, text_of
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.choice import chosen_runs, run_scores
from paged_kv.kernels.pages.page_format import PAGE_SIZE, RUN_TOKENS, summaries_of

BEFORE, MEASURED, STEP, QUERIES, BLOCK = 7168, 256, 256, 32, 64
SHARES, Q4_SHARE = (2, 4, 8), 4

Figures = dict[str, Any]
Scores = Callable[[mx.array, mx.array, float], mx.array]


class Context(NamedTuple):
    """A model that has read the first tokens of a text, and all tokens."""

    model: Any
    cache: Caches
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


@contextmanager
def choosing(model: Any, scores: Scores, read_tokens: int) -> Iterator[None]:
    """Attention of several queries that each read no more than so many tokens, in the place of
    mlx-lm's in the modules of a model."""
    module = vars(sys.modules[type(model).__module__])
    stock = module["scaled_dot_product_attention"]

    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **options: Any
    ) -> mx.array:
        if type(cache) is not KVCache:
            found: mx.array = stock(queries, keys, values, cache=cache, **options)
            return found
        asked = queries.transpose(2, 1, 0, 3)
        count, length, scale = len(asked), keys.shape[2], options["scale"]
        lengths = mx.arange(length - count + 1, length + 1)
        runs = chosen_runs(scores(asked, keys, scale), lengths, read_tokens)
        run_of = mx.arange(length) // RUN_TOKENS
        past = mx.arange(length) < lengths[:, None, None, None]
        seen = (run_of == runs[..., None]).any(axis=2)[:, :, None] & past
        weights = mx.softmax(mx.where(seen, _logits(asked, keys, scale), -mx.inf), axis=-1)
        output = mx.flatten(weights @ values, 1, 2)[:, :, None]
        return output.transpose(2, 1, 0, 3)

    module["scaled_dot_product_attention"] = attend
    try:
        yield
    finally:
        module["scaled_dot_product_attention"] = stock


def stock_caches(model: Any, paged: Caches) -> Caches:
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


def losses_of(name: str, kind: str) -> dict[str, list[float]]:
    """The nats of one text, by choice and share."""
    model, tokenizer = load_model(name)
    tokens = text_of(kind, tokenizer)[: BEFORE + MEASURED + 1]
    assert len(tokens) == BEFORE + MEASURED + 1, f"{kind} is too short"

    def context(**options: Any) -> Context:
        factory = PagedCacheFactory(model, max_bytes="4GB", **options)
        cache = read(model.model, factory.make_cache(), tokens[:BEFORE], STEP)
        return Context(model, cache, tokens)

    stock = Context(model, stock_caches(model, context().cache), tokens)
    nats = {"exact": nats_of(stock, QUERIES)}
    for choice, scores in CHOICES.items():
        for share in SHARES:
            with choosing(model, scores, BEFORE // share):
                nats[f"{choice} {share}"] = nats_of(stock, QUERIES)
    q4 = context(read_tokens=BEFORE // Q4_SHARE, page_format="q4")
    # Steps of several tokens read all.
    nats["q4 exact"], nats[f"q4 {Q4_SHARE}"] = nats_of(q4, QUERIES), nats_of(q4, 1)
    return nats


def row_of(name: str, choice: str, share: int, parts: list[dict[str, list[float]]]) -> Figures:
    """The loss of one choice over texts."""
    exact = "q4 exact" if choice == "q4" else "exact"
    pairs = [(part[f"{choice} {share}"], part[exact]) for part in parts]
    return {"model": name, "choice": choice, "share": share, **loss_of(pairs, BLOCK)}


def main() -> None:
    names = asked_models("Measure what choosing tokens loses.")
    done: dict[str, list[dict[str, list[float]]]] = {}
    compared = [*((choice, share) for choice in CHOICES for share in SHARES), ("q4", Q4_SHARE)]
    texts = set()
    for (name, kind), part in finished(losses_of, [(n, kind) for kind in KINDS for n in names]):
        done.setdefault(name, []).append(part)
        texts.add(kind)
        loss = [row_of(each, *what, parts) for each, parts in done.items() for what in compared]
        figures = {"blas": BLAS, "before": BEFORE, "measured": MEASURED, "texts": sorted(texts)}
        print(f"{name}, {kind}")
        write_result("chosen_quality", figures | {"loss": loss})


if __name__ == "__main__":
    main()
