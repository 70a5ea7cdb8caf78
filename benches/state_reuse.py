"""Repeated prompts of models whose caches mlx-lm cannot trim: python -m benches.state_reuse

Each small random model of tests/support/zoo.py that keeps only states, or appends rows, computes a
prompt of 8,192 tokens. A factory gets it after 2,048 and 4,096 tokens, where any prompt leaves a
state, and at its last token but one; mlx-lm's LRUPromptCache gets what it holds at its end. Then
follow, in turns,

    cold       the prompt without a cache, to its first token
    repeated   the same prompt with what each cache finds
    parted     the tokens that each finds of a prompt with 1,000 other tokens at its end

`kept_bytes` are the bytes of all that was inserted.
"""

from benches.openblas import BLAS

from statistics import median
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from benches.models import first_token, read
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.prompt_segments import is_on_the_way, step_ends
from paged_kv.integrations.bench.turns import in_turns, ratio
from tests.support.zoo import small_model

NAMES = ("mamba", "mamba2", "rwkv7", "deepseek_v41")
TOKENS, OTHER, STEP = 8192, 1000, 2048
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(TOKENS)]
PARTED = [*PROMPT[:-OTHER], *[(token + 1) % 97 for token in PROMPT[-OTHER:]]]
MODEL_KEY = "model"


def inserted(model: Any, factory: PagedCacheFactory) -> None:
    """Compute the prompt without its last token, and insert its states."""
    cache, begin = factory.make_cache(), 0
    for end in step_ends(0, TOKENS - 1, STEP):
        read(model, cache, PROMPT[begin:end])
        if is_on_the_way(end) or end == TOKENS - 1:
            factory.insert_cache(PROMPT[:end], cache)
        begin = end


def reuse(name: str) -> dict[str, Any]:
    """The figures of one model file."""
    model = small_model(name)
    factory, stock = PagedCacheFactory(model), LRUPromptCache()
    inserted(model, factory)
    stock.insert_cache(MODEL_KEY, PROMPT[:-1], read(model, make_prompt_cache(model), PROMPT[:-1]))

    def cold() -> int:
        return first_token(model, PROMPT, make_prompt_cache(model))[0]

    def repeated() -> int:
        cache, cached = factory.fetch_cache(PROMPT)
        return first_token(model, PROMPT[cached:], cache)[0]

    def stock_repeated() -> int:
        cache, rest = stock.fetch_nearest_cache(MODEL_KEY, PROMPT)
        return first_token(model, rest, cache)[0]

    assert cold() == repeated() == stock_repeated()
    (cold_times,) = in_turns(cold, repetitions=2)
    warm_times, stock_times = in_turns(repeated, stock_repeated, repetitions=9)
    return {
        "cold_seconds": median(cold_times),
        "repeated_seconds": median(warm_times),
        "mlx_lm_repeated_seconds": median(stock_times),
        "cold_over_repeated": median(cold_times) / median(warm_times),
        "mlx_lm_over_paged": ratio(stock_times, warm_times),
        "parted_tokens_found": factory.fetch_cache(PARTED)[1],
        "mlx_lm_parted_tokens_found": TOKENS - len(stock.fetch_nearest_cache(MODEL_KEY, PARTED)[1]),
        "kept_bytes": factory.prefixes.nbytes,
    }


def main() -> None:
    figures: dict[str, Any] = {"blas": BLAS, "tokens": TOKENS, "other_tokens": OTHER, "files": {}}
    for name in NAMES:
        figures["files"][name] = reuse(name)
        print(name, figures["files"][name], flush=True)
    write_result("state_reuse", figures)


if __name__ == "__main__":
    main()
