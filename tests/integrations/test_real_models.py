"""Real models give the tokens that they give on mlx-lm's caches, in float32 and on real prompts.

python -m benches.real_models        fetches them; without them these tests are skipped
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from benches.real_models.folders import RealModelError, model_folder
from paged_kv import NGramDraft, PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.plan.memory_plan import MemoryPlan, Planner, Wish
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.folders import ROOT
from tests.support.generation import (
    Run,
    assert_nothing_is_used,
    assert_same_run,
    assert_same_runs,
    greedy,
    runs_of,
)
from tests.support.launched_ranks import told
from tests.support.running_server import RunningServer, in_float32, paged_server, stock_server

pytestmark = pytest.mark.slow

SMOLLM2, GEMMA3 = "smollm2", "gemma3-270m"
# Log probabilities of the same model: sums of float32 run in another order.
TOLERANCE = 5e-3
NEW_TOKENS = 24
LARGE = "2GB"
# Of what a plan says, as a part of what meters show.
PLANNED = 0.05
CODE, PROSE = "integrations/paged_cache_factory.py", "docs/architecture.md"


@cache
def loaded(name: str) -> tuple[Any, Any]:
    model, tokenizer = load(str(model_folder(name)))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


class Real:
    """A model, its tokenizer, and texts as its tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.tokenizer = loaded(name)

    def prompt(self, path: str, length: int, start: int = 0) -> list[int]:
        """Tokens of a file of this checkout."""
        text = (ROOT / path).read_text(encoding="utf-8")
        tokens: list[int] = self.tokenizer.encode(text)
        assert len(tokens) >= start + length, path
        return tokens[start : start + length]

    def factory(self, **options: Any) -> PagedCacheFactory:
        return PagedCacheFactory(self.model, **{"max_bytes": LARGE, **options})

    def stock(self, prompt: list[int]) -> Run:
        """What mlx-lm generates."""
        return greedy(self.model, prompt, make_prompt_cache(self.model), NEW_TOKENS)

    def resumed(self, factory: PagedCacheFactory, prompt: list[int]) -> tuple[Run, int]:
        """What is generated behind the longest cached prefix, and that prefix's length."""
        found, cached = factory.fetch_cache(prompt)
        run = greedy(self.model, prompt[cached:], found, NEW_TOKENS)
        factory.insert_cache(prompt, found)
        return run, cached


@pytest.fixture(scope="module", autouse=True)
def _unloaded() -> Iterator[None]:
    """Free the models before the next module begins."""
    yield
    loaded.cache_clear()


def real_or_skip(name: str) -> Real:
    try:
        return Real(name)
    except RealModelError as error:
        pytest.skip(str(error))  # the message says how to get it


@pytest.fixture(params=[SMOLLM2, GEMMA3])
def real(request: pytest.FixtureRequest) -> Real:
    return real_or_skip(request.param)


@pytest.fixture
def smollm2() -> Real:
    return real_or_skip(SMOLLM2)


def test_the_converted_models_know_what_they_should(real: Real) -> None:
    text = "The capital of France is"
    if real.name == SMOLLM2:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        tokens = real.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert real.tokenizer.decode(real.stock(tokens).tokens).startswith(f"{text} Paris.")
    else:
        found = real.tokenizer.decode(real.stock(real.tokenizer.encode(text)).tokens)
        assert found.startswith(" the capital of the country of France")


@pytest.mark.parametrize(("path", "length"), [(CODE, 30), (CODE, 700), (PROSE, 2000)])
def test_a_prompt_alone_gets_the_tokens_of_mlx_lm(real: Real, path: str, length: int) -> None:
    """Windows of Gemma 3 have 512 tokens, so those of the longer two wrap."""
    prompt, factory = real.prompt(path, length), real.factory()
    ours = greedy(real.model, prompt, factory.make_cache(), NEW_TOKENS)
    assert_same_run(ours, real.stock(prompt), TOLERANCE)
    assert factory.stats().gather_fallbacks == 0
    assert_nothing_is_used(factory)


@pytest.mark.timeout(900)  # mlx-lm's attention takes most of it
def test_a_prompt_of_6000_tokens_gets_the_tokens_of_mlx_lm(smollm2: Real) -> None:
    prompt, factory = smollm2.prompt("docs/benchmarks.md", 6000), smollm2.factory()
    ours = greedy(smollm2.model, prompt, factory.make_cache(), NEW_TOKENS, step=512)
    stock = greedy(smollm2.model, prompt, make_prompt_cache(smollm2.model), NEW_TOKENS, step=512)
    assert_same_run(ours, stock, TOLERANCE)


def test_a_ragged_batch_gets_the_tokens_of_each_alone(real: Real) -> None:
    prompts = [real.prompt(CODE, 30), real.prompt(PROSE, 900), real.prompt(CODE, 333, 200)]
    factory = real.factory()
    with factory:
        generator = BatchGenerator(real.model, max_tokens=NEW_TOKENS)
        ours = runs_of(generator, generator.insert(prompts))
    assert_same_runs(ours, [real.stock(prompt) for prompt in prompts], TOLERANCE)


def test_a_prefix_is_found_and_changes_no_token(real: Real) -> None:
    text = real.prompt(PROSE, 1200)
    questions = [[*text, *real.prompt(CODE, 40, at)] for at in (100, 900)]
    factory = real.factory()
    for number, prompt in enumerate(questions):
        run, cached = real.resumed(factory, prompt)
        assert (cached >= len(text)) == (number > 0)
        assert_same_run(run, real.stock(prompt), TOLERANCE)


def test_forks_go_on_as_prompts_of_their_own(real: Real) -> None:
    text, factory = real.prompt(PROSE, 700), real.factory()
    parent = factory.make_cache()
    mx.eval(real.model(mx.array([text]), cache=parent))
    used = factory.stats().blocks_used
    for start in (50, 400):
        more = real.prompt(CODE, 300, start)
        ours = greedy(real.model, more, copy.deepcopy(parent), NEW_TOKENS)
        assert_same_run(ours, real.stock([*text, *more]), TOLERANCE)
    assert factory.stats().blocks_used == used


def test_preempted_sequences_get_the_tokens_that_they_would_have_got(smollm2: Real) -> None:
    # Each begins with two pages and needs two more.
    prompts = [smollm2.prompt(CODE, 500, at) for at in (0, 700, 1400)]
    large = smollm2.factory()
    assert large.can_admit(1)
    block = sum(group.written_block_bytes for group in large.pool.groups)
    small = smollm2.factory(max_bytes=7 * block)
    given = []
    for factory in (large, small):
        with factory:
            generator = BatchGenerator(smollm2.model, max_tokens=280)
            given.append(runs_of(generator, generator.insert(prompts)))
    assert large.stats().preemptions == 0 < small.stats().preemptions
    assert_same_runs(given[1], given[0], TOLERANCE)


def test_drafts_change_no_token(real: Real) -> None:
    # Both repeat what the text repeats.
    prompts = [real.prompt(CODE, 400, 300), real.prompt("docs/claims.md", 500, 300)]
    factory = real.factory()
    with factory:
        generator = SpeculativeBatchGenerator(
            real.model, NGramDraft(), lengths=FixedLengths(), max_tokens=NEW_TOKENS
        )
        ours = runs_of(generator, generator.insert(prompts))
    assert generator.counts.accepted_tokens > 0
    assert_same_runs(ours, [real.stock(prompt) for prompt in prompts], TOLERANCE)


def test_auto_recodes_under_pressure_and_changes_nothing_before(smollm2: Real) -> None:
    prompt = smollm2.prompt(PROSE, 2000)
    stock = smollm2.stock(prompt)
    for budget, recodes in ((LARGE, False), ("70MB", True)):
        factory = smollm2.factory(page_format="auto", max_bytes=budget)
        ours = greedy(smollm2.model, prompt, factory.make_cache(), NEW_TOKENS)
        assert any(factory.stats().requantisations.values()) == recodes
        if not recodes:
            assert_same_run(ours, stock, TOLERANCE)
        # What is recoded loses some of its bits, and no more.
        first = stock.logprobs[0]
        assert float(first.max() - first[ours.tokens[0]]) < 1.5


@pytest.mark.timeout(900)  # on a busy machine
def test_a_plan_says_what_meters_show(real: Real) -> None:
    wish = Wish(context=2048, sessions=1, page_format="fp16", step=512)
    gc.collect()
    before = mx.get_active_memory()
    model: Any = load(str(model_folder(real.name)), lazy=True)[0]
    model.set_dtype(mx.float32)
    plan = Planner([model], 4 << 30).plan(wish)
    mx.eval(model.parameters())
    mx.clear_cache()
    assert plan.weights == pytest.approx(mx.get_active_memory() - before, rel=PLANNED)
    used, held, step = metered(model, real.prompt(PROSE, wish.context), plan)
    assert plan.session == pytest.approx(used, rel=PLANNED)
    assert plan.session == pytest.approx(held, rel=PLANNED)
    assert plan.prompt_step == pytest.approx(step, rel=PLANNED)


def metered(model: Any, prompt: list[int], plan: MemoryPlan) -> tuple[int, int, int]:
    """The bytes that a session's pages take by the pool's count and by MLX's, and the most that a
    prompt step takes besides."""
    factory = PagedCacheFactory(model, max_bytes=plan.room + plan.slack, trace=os.devnull)
    before, cache = mx.get_active_memory(), factory.make_cache()
    left, most = prompt, 0
    while left:
        size = min(plan.wish.step, len(left) - 1) or 1
        mx.clear_cache()
        mx.reset_peak_memory()
        model(mx.array([left[:size]]), cache=cache)
        mx.eval([each.state for each in cache])
        mx.synchronize()
        most, left = max(most, mx.get_peak_memory()), left[size:]
    held = mx.get_active_memory() - before
    used = factory.stats().bytes_mapped
    factory.close()
    return used, held, most - before - held


@pytest.mark.parametrize("options", [[], ["--draft-model", "ngram", "--num-draft-tokens", "4"]])
def test_texts_of_the_server_equal_those_of_mlx_lms(smollm2: Real, options: list[str]) -> None:
    prompts = [smollm2.tokenizer.decode(smollm2.prompt(CODE, 200, at)) for at in (0, 500, 900)]
    common = ["--model", str(model_folder(SMOLLM2)), "--max-tokens", str(NEW_TOKENS)]
    with in_float32(), stock_server(*common) as running:
        expected = [text_of(running, prompt) for prompt in prompts]
    paged = [*common, "--max-kv-bytes", "512MB", *options]
    with in_float32(), paged_server(*paged) as running, ThreadPoolExecutor(3) as clients:
        assert list(clients.map(partial(text_of, running), prompts)) == expected


def text_of(running: RunningServer, prompt: str) -> str:
    with running.client() as client:
        answer = client.completions.create(model="default_model", prompt=prompt)
        return answer.choices[0].text


def test_three_ranks_give_the_tokens_of_one(smollm2: Real, tmp_path: Path) -> None:
    """Its three heads of keys and values cannot be shared by two."""
    prompt, cache = smollm2.prompt(CODE, 300), smollm2.factory().make_cache()
    expected = greedy(smollm2.model, prompt, cache, NEW_TOKENS).tokens
    folder = str(model_folder(SMOLLM2))
    assert told(tmp_path, 3, "real", folder, ",".join(map(str, prompt))) == [expected] * 3
