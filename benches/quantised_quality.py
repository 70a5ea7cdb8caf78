"""The quality of quantised keys and values: python -m benches.quantised_quality

Models run in float32 on modules of the standard library that they were not trained on
(`heldout_text`). "16-bit" are pages of the format "fp16", which hold the model's own numbers bit
for bit, here float32: what is compared with them has lost nothing else. The caches are those of
`cache_kinds`: pages, and mlx-lm's quantised caches with groups of 64. In a model in float32 the
two parameters of mlx-lm's groups are float32 too, which flatters it a little; `bytes` says what it
takes in 16 bits.

bytes       of one token of a full page in all layers of stdlib-llama in float16, scales included,
            and of mlx-lm's caches by their nbytes. Pages that are written: see `held_bytes`.
text        perplexity of each model on contexts of 2,048 tokens, of one file each, in steps of 128:
            every second step recodes a page. `loss_percent` is how much larger the perplexity is
            than with 16-bit pages, with the standard error over contexts, `kl_nats` the mean
            Kullback-Leibler divergence of next-token distributions from theirs. The budget of
            "auto" is the bytes of rings, and of the bytes of other 16-bit pages the smallest share
            of 40 %, 45 % and so on that a context fits in. (In float32 q4 is a seventh of them, not
            28 %.) `blocks_by_format` counts a context's last blocks, in a layer without a window.
greedy      16 prompts of 512 tokens, continued together with 128 tokens: how many are the same as
            with 16-bit pages until the first that is not. "auto" is left out: a budget for so few
            pages would cause no requantisation.
outliers    the perplexity of stdlib-llama on four such contexts, with some channels of keys and
            values 16 times as large, and queries and output projection so much smaller that the
            function of the model is the same, bit for bit: 16 is a power of 2. Keys have two
            rotary pairs in each head, values two channels. `largest_change` is how far that moved
            log-probabilities of 16-bit pages.
long        16,384 tokens of all files through stdlib-llama, in float32, with pages of float16 as
            in a model in 16 bits, under a third of the bytes of such pages. The model was trained
            on contexts of 4,096: the base of its rotary positions is raised to 200,000, without
            which the perplexity is above 100 here. Each row of a timeline is the pool after so
            many tokens, and the perplexity of the 1,024 before.

Parts run in two processes, as nothing here is a time; each writes the results file anew.
"""

import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import mean, median, stdev
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from benches.cache_kinds import KINDS, MLX_GROUP, Caches, Maker, paged
from benches.heldout_text import MODELS, contexts, files, model_in_float32
from benches.results_file import write_result
from paged_kv import OldestFirst, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.cache.saved_state import page_formats
from paged_kv.integrations.attention_hook import ATTENTION
from paged_kv.integrations.model_hooks import modules_of
from paged_kv.kernels.pages.page_format import PAGE_SIZE

TOKENS, CONTEXTS, OUTLIER_CONTEXTS, STEP = 2048, 10, 4, 128
AUTO_PERCENT = range(40, 101, 5)
PROMPTS, PROMPT_TOKENS, GENERATED = 16, 512, 128
OUTLIER = 16
KEY_PAIRS, VALUE_CHANNELS = (5, 20), (7, 40)
WITH_OUTLIERS = ("fp16", "q8", "q4", "q4-unrotated", "mlx-lm 8 bits", "mlx-lm 4 bits")
LONG_TOKENS, LONG_STEP, LONG_BASE, TIMES_OVER = 16_384, 512, 200_000, 3
LONG_RUNS, TIMELINE_TOKENS = ("fp16", "auto", "recent=1"), 1024

Figures = dict[str, Any]


def log_probs(model: Any, cache: Caches, tokens: list[int], step: int) -> Iterator[mx.array]:
    """Log-probabilities [step, vocabulary] of what follows each of the tokens, step by step."""
    for start in range(0, len(tokens), step):
        logits = model(mx.array([tokens[start : start + step]]), cache=cache)[0]
        logits = logits.astype(mx.float32)
        result = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(result)
        yield result


def all_log_probs(model: Any, cache: Caches, context: list[int]) -> mx.array:
    return mx.concatenate(list(log_probs(model, cache, context[:-1], STEP)))


def nats(predicted: mx.array, following: list[int]) -> float:
    """Mean cross-entropy of the tokens that followed."""
    return -float(mx.mean(mx.take_along_axis(predicted, mx.array(following)[:, None], -1)))


def divergence(of: mx.array, from_: mx.array) -> float:
    return float(mx.mean(mx.sum(mx.exp(from_) * (from_ - of), axis=-1)))


def size_of_tokens() -> Figures:
    """Bytes of a token in stdlib-llama in float16."""
    model, _ = model_in_float32("stdlib-llama")
    model.set_dtype(mx.float16)
    page, token = mx.zeros((1, PAGE_SIZE), dtype=mx.int32), mx.zeros((1, 1), dtype=mx.int32)
    rows: Figures = {}
    for name, make in KINDS.items():
        cache = make(model)
        if name.startswith("mlx-lm"):
            cache = [QuantizedKVCache(MLX_GROUP, int(name.split()[1])) for _ in cache]
        mx.eval(model(page, cache=cache))
        total = nbytes(cache)
        if isinstance(cache[0], PagedKVCache):
            # What a second full page adds: the first may be larger. Each token begins a page, and
            # the full one is recoded.
            mx.eval(model(token, cache=cache))
            first = bytes_active(cache)
            mx.eval(model(page[:, 1:], cache=cache))
            mx.eval(model(token, cache=cache))
            total = bytes_active(cache) - first
        size = total / PAGE_SIZE
        rows[name] = {"token_bytes": size, "bits_per_value": 8 * size / values_of_token(model)}
    for row in rows.values():
        row["times_smaller"] = rows["fp16"]["token_bytes"] / row["token_bytes"]
    print("bytes", rows, flush=True)
    return rows


def values_of_token(model: Any) -> int:
    """Numbers in the keys and values of a token."""
    return sum(2 * layer.self_attn.k_proj.weight.shape[0] for layer in model.layers)


def bytes_active(cache: Caches) -> int:
    return int(cache[0].pool.stats().bytes_active)


def nbytes(cache: Caches) -> int:
    return sum(each.nbytes for each in cache)


def auto_budget(model: Any, text: list[int], cache: Caches) -> int:
    """What the rings of a full 16-bit cache take, and the least share of its other pages that is
    enough."""
    rings = sum(each.nbytes for each in cache if each.layer in cache[0].pool.windows)
    for percent in AUTO_PERCENT:
        budget: int = rings + percent * (nbytes(cache) - rings) // 100
        try:
            all_log_probs(model, paged("auto", budget)(model), text)
            return budget
        except PoolExhausted as error:
            print(f"auto with {percent} %: {error}", flush=True)
    raise AssertionError("16-bit pages fit in their own bytes")


def perplexities(model: Any, kinds: dict[str, Maker], texts: list[list[int]]) -> Figures:
    """Of each kind of cache, compared with 16-bit pages; "auto" too where that is among them."""
    losses: dict[str, list[float]] = {name: [] for name in kinds}
    kls: dict[str, list[float]] = {name: [] for name in kinds}
    ends: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    budget = 0
    for text in texts:
        reference = mx.array(0.0)
        for name, make in kinds.items():
            cache = paged("auto", budget)(model) if name == "auto" else make(model)
            predicted = all_log_probs(model, cache, text)
            if name == "fp16":
                reference = predicted
                if "auto" in kinds and not budget:
                    budget = auto_budget(model, text, cache)
            losses[name].append(nats(predicted, text[1:]))
            kls[name].append(divergence(predicted, reference))
            ends[name] = end_of(cache)
            del cache
    rows = {
        name: {**compared(losses[name], losses["fp16"]), "kl_nats": mean(kls[name]), **ends[name]}
        for name in kinds
    }
    for name, row in rows.items():
        print(name, row, flush=True)
    return rows


def end_of(cache: Caches) -> Figures:
    """What pages became, in layers without a window where there are both."""
    if not isinstance(cache[0], PagedKVCache):
        return {}
    pool = cache[0].pool
    full = next(each for each in cache if each.layer not in pool.windows)
    formats = Counter(page_formats(pool, full.layer, full.sequences[0]))
    end: Figures = {"blocks_by_format": dict(formats)}
    if pool.requantisation_policy:
        end["requantisations"] = dict(pool.stats().requantisations)
        end["max_bytes"] = pool.budget.max_bytes
    return end


def compared(losses: list[float], reference: list[float]) -> Figures:
    differences = [one - other for one, other in zip(losses, reference, strict=True)]
    return {
        "perplexity": math.exp(mean(losses)),
        "loss_percent": 100 * math.expm1(mean(differences)),
        "standard_error_percent": 100 * stdev(differences) / math.sqrt(len(differences)),
    }


def largest_change(one: mx.array, other: mx.array) -> float:
    return float(mx.max(mx.abs(one - other)))


def text_of(name: str) -> Figures:
    model, tokenizer = model_in_float32(name)
    texts = contexts(tokenizer, TOKENS, CONTEXTS)
    kinds = {"fp16": KINDS["fp16"], "auto": paged("auto"), **KINDS}
    figures = {"rows": perplexities(model, kinds, texts)}
    if name == "stdlib-llama":
        figures["mlx_lm_check"] = mlx_lm_check(model, texts[0])
    return figures


def mlx_lm_check(model: Any, text: list[int]) -> dict[str, Figures]:
    """How far mlx-lm's own quantised caches are from what is measured here, on 512 tokens."""
    piece, check = text[:513], {}
    for bits in (8, 4):
        own = [QuantizedKVCache(MLX_GROUP, bits) for _ in model.layers]
        one = all_log_probs(model, own, piece)
        other = all_log_probs(model, KINDS[f"mlx-lm {bits} bits"](model), piece)
        check[f"{bits} bits"] = {
            "difference_percent": 100 * math.expm1(nats(one, piece[1:]) - nats(other, piece[1:])),
            "kl_nats": divergence(one, other),
        }
    print("mlx-lm's own caches:", check, flush=True)
    return check


def greedy_of(name: str) -> Figures:
    model, tokenizer = model_in_float32(name)
    prompts = [text[:PROMPT_TOKENS] for text in contexts(tokenizer, TOKENS, PROMPTS)]
    reference = continued(model, KINDS["fp16"](model), prompts)
    rows = {}
    for kind, make in KINDS.items():
        if kind != "fp16":
            lengths = equal_tokens(continued(model, make(model), prompts), reference)
            rows[kind] = {"median": median(lengths), "lengths": lengths}
            print(name, kind, rows[kind], flush=True)
    return rows


def continued(model: Any, cache: Caches, prompts: list[list[int]]) -> list[list[int]]:
    tokens, steps = mx.array(prompts), []
    for start in range(0, PROMPT_TOKENS, STEP):
        logits = model(tokens[:, start : start + STEP], cache=cache)
        mx.eval(logits)
    for _ in range(GENERATED):
        steps.append(mx.argmax(logits[:, -1:], axis=-1))
        logits = model(steps[-1], cache=cache)
        mx.eval(logits)
    found: Any = mx.concatenate(steps, axis=1).tolist()
    return list(found)


def equal_tokens(found: list[list[int]], reference: list[list[int]]) -> list[int]:
    """How many tokens of each row are equal before the first that is not."""
    return [
        next((at for at, (a, b) in enumerate(zip(*rows, strict=True)) if a != b), len(rows[0]))
        for rows in zip(found, reference, strict=True)
    ]


def outliers() -> Figures:
    model, tokenizer = model_in_float32("stdlib-llama")
    texts = contexts(tokenizer, TOKENS, OUTLIER_CONTEXTS)
    before = all_log_probs(model, KINDS["fp16"](model), texts[0])
    for layer in model.layers:
        plant_outliers(layer.self_attn)
    after = all_log_probs(model, KINDS["fp16"](model), texts[0])
    rows = perplexities(model, {name: KINDS[name] for name in WITH_OUTLIERS}, texts)
    return {"times_larger": OUTLIER, "largest_change": largest_change(after, before), "rows": rows}


def plant_outliers(attention: Any) -> None:
    dim = attention.k_proj.weight.shape[0] // attention.n_kv_heads
    queries_per_key = attention.n_heads // attention.n_kv_heads
    # Rotary positions turn channels i and i + dim / 2 into each other: both or neither.
    keys = scales(dim, [half + pair for pair in KEY_PAIRS for half in (0, dim // 2)])
    values = scales(dim, list(VALUE_CHANNELS))
    attention.k_proj.weight *= mx.tile(keys, attention.n_kv_heads)[:, None]
    attention.q_proj.weight /= mx.tile(keys, attention.n_heads)[:, None]
    attention.v_proj.weight *= mx.tile(values, attention.n_kv_heads)[:, None]
    attention.o_proj.weight /= mx.tile(values, queries_per_key * attention.n_kv_heads)
    mx.eval(attention.parameters())


def scales(dim: int, channels: list[int]) -> mx.array:
    return mx.array([float(OUTLIER) if channel in channels else 1.0 for channel in range(dim)])


class HalfPages(PagedKVCache):
    """Pages of float16 in a model that computes in float32."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(keys.astype(mx.float16), values.astype(mx.float16))


def half_pages(model: Any, page_format: Any, max_bytes: int | None = None) -> Caches:
    ATTENTION.install(modules_of(model))
    layers = len(model.layers)
    pool = PagePool(layers, page_format=page_format, max_bytes=max_bytes)
    sequence = Sequence(pool)
    return [HalfPages(pool, layer, [sequence]) for layer in range(layers)]


def long_run(choice: str) -> Figures:
    """A timeline; "auto" and "recent=1" have a third of what 16-bit pages take as their budget."""
    model, tokenizer = model_in_float32("stdlib-llama")
    for layer in model.layers:
        layer.self_attn.rope.base = LONG_BASE
    sixteen_bit = LONG_TOKENS * values_of_token(model) * mx.float16.size
    policy = {"recent=1": OldestFirst(recent=1)}.get(choice, choice)
    budget = None if choice == "fp16" else sixteen_bit // TIMES_OVER
    cache = half_pages(model, policy, budget)
    tokens = [token for file in files(tokenizer) for token in file][: LONG_TOKENS + 1]
    timeline: list[Figures] = []
    row = {"max_bytes": budget, "bytes_of_16_bit_pages": sixteen_bit, "timeline": timeline}
    try:
        losses = read_long(model, cache, tokens, timeline)
    except PoolExhausted as error:
        done = cache[0].size()
        print(choice, "exhausted at", done, error, flush=True)
        return {**row, "exhausted_at": done, "exhausted": str(error), "end": pool_row(cache)}
    return {**row, "perplexity": math.exp(mean(losses)), "end": pool_row(cache)}


def read_long(model: Any, cache: Caches, tokens: list[int], timeline: list[Figures]) -> list[float]:
    losses = []
    latest = TIMELINE_TOKENS // LONG_STEP
    for index, predicted in enumerate(log_probs(model, cache, tokens[:-1], LONG_STEP)):
        start = index * LONG_STEP
        losses.append(nats(predicted, tokens[start + 1 : start + 1 + LONG_STEP]))
        if len(losses) % latest == 0:
            perplexity = math.exp(mean(losses[-latest:]))
            timeline.append({**pool_row(cache), "perplexity": perplexity})
            print(timeline[-1], flush=True)
    return losses


def pool_row(cache: Caches) -> Figures:
    stats = cache[0].pool.stats()
    return {
        "tokens": cache[0].size(),
        "blocks_by_format": dict(stats.blocks_by_format),
        "requantisations": dict(stats.requantisations),
        "bytes_mapped": stats.bytes_mapped,
    }


Part = tuple[Callable[..., Figures], tuple[str, ...]]
PARTS: dict[str, Part] = {
    "bytes": (size_of_tokens, ()),
    **{f"text {name}": (text_of, (name,)) for name in MODELS},
    "outliers": (outliers, ()),
    **{f"greedy {name}": (greedy_of, (name,)) for name in MODELS},
    **{f"long {name}": (long_run, (name,)) for name in LONG_RUNS},
}


def figures_of(parts: dict[str, Figures]) -> Figures:
    """What a results file holds of the parts that are done."""
    of_models = {
        kind: {name: parts[f"{kind} {name}"] for name in MODELS if f"{kind} {name}" in parts}
        for kind in ("text", "greedy")
    }
    runs = {name: parts[f"long {name}"] for name in LONG_RUNS if f"long {name}" in parts}
    return {
        "backend": PagePool(1, max_bytes=1 << 20).stats().backend,
        "blas": BLAS,
        "tokens": CONTEXTS * TOKENS,
        "context": TOKENS,
        "step": STEP,
        "mlx_lm_group": MLX_GROUP,
        "bytes": parts.get("bytes", {}),
        "text": of_models["text"],
        "greedy": {
            "prompts": PROMPTS,
            "prompt_tokens": PROMPT_TOKENS,
            "generated": GENERATED,
            "rows": of_models["greedy"],
        },
        "outliers": {"tokens": OUTLIER_CONTEXTS * TOKENS, **parts.get("outliers", {"rows": {}})},
        "long": {
            "tokens": LONG_TOKENS,
            "step": LONG_STEP,
            "rope_base": LONG_BASE,
            "runs": runs,
        },
    }


def main() -> None:
    parts: dict[str, Figures] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as processes:
        running = {
            processes.submit(work, *arguments): name for name, (work, arguments) in PARTS.items()
        }
        for done in as_completed(running):
            parts[running[done]] = done.result()
            written = write_result("quantised_quality", figures_of(parts)).name
            print(f"{running[done]}: written to {written}", flush=True)


if __name__ == "__main__":
    main()
