"""With `install(keep_prompts=True)` a prompt starts from what earlier ones have computed."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step

from paged_kv import PagedCacheFactory
from tests.support.generation import greedy, runs_of
from tests.support.zoo import small_model

PROMPTS = [[(seed * i * i + 3 * i + seed) % 97 for i in range(300)] for seed in range(5)]


@pytest.mark.parametrize("name", ["qwen3", "falcon_h1"])
def test_later_prompts_start_from_what_earlier_ones_computed(name: str) -> None:
    model: Any = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    assert factory.install(keep_prompts=True)
    generator = BatchGenerator(model, max_tokens=3)

    def asked(*prompts: list[int], running: tuple[int, ...] = ()) -> tuple[list[list[int]], int]:
        """The answers, and how many tokens of the prompts were computed before the last ones."""
        with generator.stats() as stats:
            runs = runs_of(generator, [*generator.insert(list(prompts)), *running])
        return [run.tokens for run in runs], stats.prompt_tokens

    (answer,), computed = asked(PROMPTS[0])
    assert computed == 299
    with factory:  # It is installed already.
        assert asked(PROMPTS[0], [*PROMPTS[0], *answer, 5, 6])[1] == 1
    # A prompt is found as soon as it is computed.
    running = tuple(generator.insert([PROMPTS[1]]))
    while not generator.next()[1]:
        pass
    assert asked(PROMPTS[1], running=running)[1] == 0
    # Rows that wait share what they begin with.
    waiting = [generator.insert([[*PROMPTS[4], last, last]])[0] for last in (1, 2)]
    with generator.stats() as stats:
        runs_of(generator, waiting)
    assert stats.prompt_tokens == 302
    # mlx-lm's server makes empty caches itself.
    with generator.stats() as stats:
        runs_of(generator, generator.insert([PROMPTS[1]], caches=[factory.make_cache()]))
    assert stats.prompt_tokens == 0
    # Of another cache's tokens nothing is known.
    cache = factory.make_cache()
    greedy(model, PROMPTS[2], cache, 1)
    runs = runs_of(generator, generator.insert([[50]], caches=[cache]))
    assert factory.fetch_cache([50, *runs[0].tokens, 6])[1] == 0
    tokens = [[each for each, _ in generate_step(mx.array(PROMPTS[3]), model, max_tokens=2)]]
    assert factory.fetch_cache(PROMPTS[3])[1] == 299
    factory.uninstall()
    tokens += [[each for each, _ in generate_step(mx.array(PROMPTS[3]), model, max_tokens=2)]]
    assert tokens[0] == tokens[1]
