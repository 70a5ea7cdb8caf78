"""The savings of shared prefixes, on stdlib-llama: python -m benches.prefix_reuse

    first token    the time to the first token of a prompt of 3,500 tokens and 32 more, cold, and
                   warm: with the first 3,500 cached, with paged caches and with mlx-lm's
                   LRUPromptCache, whose hit copies the cache
    conversation   20 turns of 32 new tokens and 64 answered; how many of all prompt tokens hit
    together       32 requests of 16 tokens after a common prefix of 2,048, answered with 16 tokens
                   by mlx-lm's batch generator: blocks in use beside those of one prefix and the
                   last blocks, and the time to the last answer. With paged caches all are inserted
                   at once; with mlx-lm's the prefix is computed first and put into its
                   LRUPromptCache, which then gives each request a copy
    fork           of a sequence of 32,768 tokens, in all its layers
    look-up        of 8,192 tokens in an index of 100,000 blocks

Sides that are compared take turns, and each figure is the median of its repetitions.
"""

from benches.openblas import BLAS

import copy
import random
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from benches.models import filled, first_token, load_model, random_tokens, read
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.integrations.bench.turns import in_turns, ratio
from tests.support.reserving import reserve

COMMON, NEW = 3500, 32
TURNS, ASKED, ANSWERED = 20, 32, 64
REQUESTS, PREFIX, OWN = 32, 2048, 16
FORKED = 32_768
INDEXED, LOOKED_UP = 100_000, 8192
MODEL_KEY = "model"


def time_to_first_token(model: Any) -> dict[str, Any]:
    prompt = random_tokens(model, COMMON + NEW, seed=0)
    factory = PagedCacheFactory(model)
    common = prompt[:COMMON]
    factory.insert_cache(common, read(model, factory.make_cache(), common))
    stock = LRUPromptCache()
    stock.insert_cache(MODEL_KEY, common, read(model, make_prompt_cache(model), common))

    def paged_warm() -> int:
        found, cached = factory.fetch_cache(prompt)
        return first_token(model, prompt[cached:], found)[0]

    def stock_warm() -> int:
        found, rest = stock.fetch_nearest_cache(MODEL_KEY, prompt)
        return first_token(model, rest, found)[0]

    works: dict[str, Callable[[], int]] = {
        "paged_cold": lambda: first_token(model, prompt, factory.make_cache())[0],
        "paged_warm": paged_warm,
        "mlx_lm_cold": lambda: first_token(model, prompt, make_prompt_cache(model))[0],
        "mlx_lm_warm": stock_warm,
    }
    assert len({work() for work in works.values()}) == 1
    times = dict(zip(works, in_turns(*works.values(), repetitions=3), strict=True))
    return {
        "common_tokens": COMMON,
        "new_tokens": NEW,
        **{f"{name}_seconds": median(each) for name, each in times.items()},
        "paged_cold_over_warm": ratio(times["paged_cold"], times["paged_warm"]),
        "mlx_lm_cold_over_warm": ratio(times["mlx_lm_cold"], times["mlx_lm_warm"]),
        "mlx_lm_warm_over_paged_warm": ratio(times["mlx_lm_warm"], times["paged_warm"]),
    }


def conversation(model: Any) -> dict[str, Any]:
    factory = PagedCacheFactory(model)
    text: list[int] = []
    asked = found = again = 0
    for turn in range(TURNS):
        again += len(text)
        text += random_tokens(model, ASKED, seed=turn)
        cache, cached = factory.fetch_cache(text)
        asked, found = asked + len(text), found + cached
        steps = generate_step(
            mx.array(text[cached:]), model, prompt_cache=cache, max_tokens=ANSWERED
        )
        text += [int(token) for token, _ in steps]
        factory.insert_cache(text, cache)
    return {
        "turns": TURNS,
        "prompt_tokens": asked,
        "tokens_found": found,
        "share_found": found / asked,
        "share_of_earlier_tokens_found": found / again,
    }


def answers(
    model: Any,
    prompts: list[list[int]],
    caches: list[Any] | None = None,
    look: Callable[[], None] = lambda: None,
) -> dict[int, list[int]]:
    """What follows each prompt."""
    generator = BatchGenerator(
        model, max_tokens=OWN, completion_batch_size=REQUESTS, prefill_batch_size=REQUESTS
    )
    tokens: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts, caches=caches)}
    while any(len(row) < OWN for row in tokens.values()):
        _, responses = generator.next()
        look()
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    return tokens


def together(model: Any) -> dict[str, Any]:
    prefix = random_tokens(model, PREFIX, seed=1)
    prompts = [prefix + random_tokens(model, OWN, seed=2 + row) for row in range(REQUESTS)]
    used: list[int] = []

    def paged() -> dict[int, list[int]]:
        factory = PagedCacheFactory(model)
        with factory:
            return answers(model, prompts, look=lambda: used.append(factory.stats().blocks_used))

    def stock() -> dict[int, list[int]]:
        known = LRUPromptCache()
        known.insert_cache(MODEL_KEY, prefix, read(model, make_prompt_cache(model), prefix))
        found = [known.fetch_nearest_cache(MODEL_KEY, prompt) for prompt in prompts]
        return answers(model, [rest for _, rest in found], [cache for cache, _ in found])

    equal = sum(
        ours == theirs
        for ours, theirs in zip(*(side().values() for side in (paged, stock)), strict=True)
    )
    paged_times, stock_times = in_turns(paged, stock, repetitions=3)
    tails = REQUESTS * -(-2 * OWN // 256)
    tokens = REQUESTS * (PREFIX + 2 * OWN)
    return {
        "requests": REQUESTS,
        "prefix_tokens": PREFIX,
        "own_tokens": OWN,
        "requests_with_equal_tokens": equal,
        "most_blocks_used": max(used),
        "blocks_of_one_prefix": PREFIX // 256,
        "blocks_of_tails": tails,
        "blocks_over_prefix_and_tails": max(used) / (PREFIX // 256 + tails),
        "paged_seconds": median(paged_times),
        "mlx_lm_seconds": median(stock_times),
        "paged_tokens_per_second": tokens / median(paged_times),
        "mlx_lm_tokens_per_second": tokens / median(stock_times),
        "mlx_lm_over_paged": ratio(stock_times, paged_times),
    }


def fork(model: Any) -> dict[str, Any]:
    factory = PagedCacheFactory(model)
    cache = filled(model, factory.make_cache(), 1, FORKED)
    copies = factory.stats().cow_copies
    (times,) = in_turns(lambda: copy.deepcopy(cache), repetitions=51)
    assert factory.stats().cow_copies == copies
    return {"tokens": FORKED, "layers": len(cache), "seconds": median(times), "pages_copied": 0}


def look_up() -> dict[str, Any]:
    allocator = BlockAllocator(ByteBudget(2 * INDEXED), 1)
    index = PrefixIndex()
    numbers = random.Random(0)
    base = [numbers.randrange(100_000) for _ in range(LOOKED_UP)]
    while len(index) < INDEXED:
        cut = numbers.randrange(LOOKED_UP)
        tokens = base[:cut] + [numbers.randrange(100_000) for _ in range(LOOKED_UP - cut)]
        table = allocator.new_table()
        reserve(table, 0, len(tokens))
        index.insert("", tokens, [{allocator: block} for block in table.blocks])
        allocator.drop(table)
    (times,) = in_turns(lambda: index.match("", base), repetitions=51)
    return {"blocks": len(index), "tokens": LOOKED_UP, "seconds": median(times)}


def main() -> None:
    model, _ = load_model("stdlib-llama")
    figures: dict[str, Any] = {
        "blas": BLAS,
        "backend": PagedCacheFactory(model).stats().backend,
        "look_up": look_up(),
    }
    for part in (fork, time_to_first_token, conversation, together):
        figures[part.__name__] = part(model)
        print(part.__name__, figures[part.__name__], flush=True)
    write_result("prefix_reuse", figures)


if __name__ == "__main__":
    main()
