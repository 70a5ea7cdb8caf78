"""What ranks do in the tests of several processes.

    python -m tests.support.rank_cases FOLDER CASE ...

Each rank writes what the case returns to FOLDER/CASE-RANK.json.
"""

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import shard_linear
from mlx_lm import load, server
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import sharded_load

from paged_kv import (
    HeadDraft,
    NGramDraft,
    PagedCacheFactory,
    PoolExhausted,
    SpeculativeBatchGenerator,
    command_line,
)
from paged_kv.integrations.distributed.sharded_model import digest
from paged_kv.integrations.generation.text_generation import finish_steps
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.generation import greedy, runs_of
from tests.support.heads import random_head
from tests.support.zoo import small_model

# Enough for every sequence of a story, and little.
LARGE, SMALL = 64_000_000, 1_600_000

HEADS_FOR_3 = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192}


# Shared layer by layer, as with mlx-lm's --pipeline; with as many layers on each rank.
PIPELINES = {"qwen2": {"num_hidden_layers": 4}, "deepseek_v41 by layers": {}}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(1, 100), k=length)


def sharded(name: str, group: mx.distributed.Group, **changes: Any) -> Any:
    """A small random model, or this rank's shard of it."""
    model: Any = small_model(name.split()[0], **changes, **PIPELINES.get(name, {}))
    if group.size() > 1 and name in PIPELINES:
        model.model.pipeline(group)
    elif group.size() > 1 and hasattr(model, "shard"):
        model.shard(group)
    elif group.size() > 1:
        _shard_by_hand(model, group)
    mx.eval(model.parameters())
    return model


def _shard_by_hand(model: Any, group: mx.distributed.Group) -> None:
    """What mlx-lm does for other models, for gemma3_text, which it cannot shard."""
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for part, names in ((attention, "q_proj k_proj v_proj"), (mlp, "gate_proj up_proj")):
            for each in names.split():
                part[each] = shard_linear(part[each], "all-to-sharded", group=group)
        attention.o_proj = shard_linear(attention.o_proj, "sharded-to-all", group=group)
        mlp.down_proj = shard_linear(mlp.down_proj, "sharded-to-all", group=group)
        attention.n_heads //= group.size()
        attention.n_kv_heads //= group.size()


def story(model: Any, factory: PagedCacheFactory) -> dict[str, Any]:
    """Tokens of a prompt alone, streamed, of a prompt that goes on behind it under two salts, and
    of a ragged batch."""
    first = prompt(300)
    cache, _ = factory.fetch_cache(first, salt="a")
    alone = [int(token) for token, _ in generate_step(
        mx.array(first), model, prompt_cache=cache, max_tokens=8)]  # fmt: skip
    factory.insert_cache([*first, *alone], cache, salt="a")
    longer = [*first, *alone, 5, 6, 7]
    cached = [factory.fetch_cache(longer, salt=salt)[1] for salt in ("a", "b")]
    cache, known = factory.fetch_cache(longer, salt="a")
    again = [int(token) for token, _ in generate_step(
        mx.array(longer[known:]), model, prompt_cache=cache, max_tokens=4)]  # fmt: skip
    del cache
    lengths = [251, 20, 253, 90, 248]
    batched = batch(model, factory, [prompt(n, seed) for seed, n in enumerate(lengths, 1)], 12)
    return {"alone": alone, "cached": cached, "again": again, "batched": batched}


def batch(model: Any, factory: PagedCacheFactory, prompts: Any, count: int) -> list[list[int]]:
    """Tokens of prompts in one batch, with preemption where the pool is full."""
    with factory:
        generator = BatchGenerator(model, stream=mx.default_stream(mx.default_device()))
        uids = generator.insert(prompts, max_tokens=[count] * len(prompts))
        given: dict[int, list[int]] = {uid: [] for uid in uids}
        # A response holds the pages of an ended sequence, so none is kept over a step.
        while tokens := [(each.uid, each.token) for each in generator.next_generated()]:
            for uid, token in tokens:
                given[uid].append(token)
        generator.close()
    return [given[uid] for uid in uids]


def stories(group: mx.distributed.Group, *names: str, size: int = 2) -> dict[str, Any]:
    """The story of each of these models, with budgets that differ between ranks."""
    found = {}
    for name in names:
        model = sharded(name, group, **(HEADS_FOR_3 if size == 3 else {}))
        factory = PagedCacheFactory(model, max_bytes=LARGE if group.rank() == 0 else SMALL)
        found[name] = story(model, factory)
        stats = factory.stats()
        found[f"of {name}"] = {
            "budget": stats.bytes_budget,
            "block_bytes": [each.size.block_bytes for each in factory.pool.groups],
            "repeated": sum(each.repeated for each in factory.recordings.values()),
            "preemptions": stats.preemptions,
            "digest": digest(factory.pool),
        }
    return found


def drafts(group: mx.distributed.Group, *names: str) -> dict[str, list[Any]]:
    """Tokens of a ragged batch with drafts of a random head, and of look-up, beside those without;
    and how many were drafted."""
    found: dict[str, list[Any]] = {}
    prompts = [prompt(n, seed) for seed, n in enumerate((251, 20, 253, 90, 248), 1)]
    for name in names:
        model = sharded(name, group)
        factory = PagedCacheFactory(model, max_bytes=LARGE, head=random_head(model))
        found[name] = [batch(model, factory, prompts, 12)]
        for draft in (HeadDraft(factory), NGramDraft(1)):
            with factory:
                generator = SpeculativeBatchGenerator(
                    model, draft, max_tokens=12, lengths=FixedLengths()
                )
                runs = runs_of(generator, generator.insert(prompts))
                found[name] += [[run.tokens for run in runs], generator.counts.draft_tokens]
    return found


def rows(group: mx.distributed.Group, name: str) -> list[Any]:
    """Tokens of prompts by mlx-lm's own caches, by pages, and behind a cached prefix of each."""
    model = sharded(name, group)
    factory = PagedCacheFactory(model, max_bytes=LARGE)
    found = list[Any]()
    for length in (3, 300, 531):
        tokens = prompt(length, length)
        caches = [make_prompt_cache(model), factory.make_cache()]
        runs = [decoded(model, tokens, each) for each in caches]
        factory.insert_cache(tokens, caches[1])
        again, cached = factory.fetch_cache(tokens)
        found.append([*runs, decoded(model, tokens[cached:], again), cached])
    return found


def decoded(model: Any, tokens: list[int], cache: Any) -> list[int]:
    """Twelve tokens behind these."""
    steps = generate_step(mx.array(tokens), model, prompt_cache=cache, max_tokens=12)
    return [int(token) for token, _ in steps]


def full(group: mx.distributed.Group) -> dict[str, Any]:
    """A batch that needs more blocks than rank 1 has, and a prompt that it can never hold."""
    model = sharded("qwen3", group)
    factory = PagedCacheFactory(model, max_bytes=LARGE if group.rank() == 0 else 1_200_000)
    batched = batch(model, factory, [prompt(n, n) for n in (215, 216, 217, 218, 219, 220)], 46)
    found = {"batched": batched, "refused": ""}
    try:
        batch(model, factory, [prompt(3000)], 4)
    except PoolExhausted as error:
        found["refused"] = str(error)
    return {**found, "preemptions": factory.stats().preemptions, "digest": digest(factory.pool)}


def history(group: mx.distributed.Group, seed: str) -> list[Any]:
    """A random history of requests that share prefixes. Ranks collect garbage and have memory as
    they like; what the history tells after each request is to be equal on all."""
    rng, own = random.Random(seed), random.Random(f"{seed} {group.rank()}")
    model = sharded("llama", group)
    factory = PagedCacheFactory(model, max_bytes=LARGE if group.rank() == 0 else SMALL)
    known, found = [prompt(280, 1), prompt(530, 2)], list[Any]()
    for number in range(25):
        begin = rng.choice(known)[: rng.randrange(1, 560)]
        tokens, salt = [*begin, *prompt(rng.randrange(1, 40), number)], rng.choice([None, "a"])
        if rng.random() < 0.3:
            given: Any = batch(model, factory, [tokens, *rng.choices(known, k=2)], number + 1)
        else:
            cache, cached = factory.fetch_cache(tokens, salt=salt)
            given = cached, [int(token) for token, _ in generate_step(
                mx.array(tokens[cached:]), model, prompt_cache=cache, max_tokens=5)]  # fmt: skip
            if rng.random() < 0.7:
                factory.insert_cache(tokens, cache, salt=salt)
                known.append(tokens)
            del cache
        if rng.random() < 0.1:
            factory.clear()
        if own.random() < 0.3:
            gc.collect()
        found.append([given, digest(factory.pool)])
    return [*found, sum(factory.stats().evictions.values())]


def three(group: mx.distributed.Group, *names: str) -> dict[str, Any]:
    """As `stories`, of models whose heads three ranks can share."""
    return stories(group, *names, size=3)


def real(group: mx.distributed.Group, folder: str, tokens: str) -> list[int]:
    """The greedy tokens behind a prompt, of a model that the ranks share."""
    model: Any = load(folder)[0]
    model.set_dtype(mx.float32)
    model.shard(group)
    cache = PagedCacheFactory(model, max_bytes="1GB").make_cache()
    return greedy(model, [int(token) for token in tokens.split(",")], cache, 24).tokens


def restart(group: mx.distributed.Group, folder: str) -> list[dict[str, Any]]:
    """A prompt of two full pages from stores; then rank 1 loses the second."""
    model, tokens = sharded("qwen3", group), prompt(700)
    found: list[dict[str, Any]] = []
    for attempt in range(3):
        factory = PagedCacheFactory(model, max_bytes=LARGE, store=folder)
        cache, cached = factory.fetch_cache(tokens)
        given = [int(token) for token, _ in generate_step(
            mx.array(tokens[cached:]), model, prompt_cache=cache, max_tokens=4)]  # fmt: skip
        found.append({"cached": cached, "tokens": given, "digest": digest(factory.pool)})
        factory.insert_cache(tokens, cache)
        del cache
        factory.close()
        if attempt == 1 and group.rank() == 1:
            files = Path(folder).glob("rank-1-of-2/**/*.safetensors")
            second, _ = sorted(files, key=lambda path: path.stat().st_mtime_ns)
            second.write_bytes(second.read_bytes()[:-1] + b"!")
    return found


def serve(group: mx.distributed.Group, budgets: str, *options: str) -> int:
    """`paged-kv server` in float32, with one of these budgets on each rank."""
    load = sharded_load

    def in_float32(*args: Any, **named: Any) -> Any:
        loaded = load(*args, **named)
        loaded[0].set_dtype(mx.float32)
        return loaded

    setattr(server, load.__name__, in_float32)
    budget = budgets.split(",")[group.rank()]
    return command_line.main(["server", "--max-kv-bytes", budget, *options])


def main() -> None:
    """Run a case on this rank."""
    folder, case, *arguments = sys.argv[1:]
    group = mx.distributed.init()
    found = globals()[case](group, *arguments)
    if case == "serve":
        sys.exit(found)
    finish_steps()
    (Path(folder) / f"{case}-{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
