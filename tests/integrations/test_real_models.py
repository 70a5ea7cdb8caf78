"""Real models give the tokens that they give on mlx-lm's caches, in float32 and on real prompts.

python -m benches.real_models        fetches them; without them these tests are skipped
"""

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from benches.real_models.folders import RealModelError, model_folder
from paged_kv import NGramDraft, PagedCacheFactory, SpeculativeBatchGenerator
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

pytestmark = pytest.mark.slow

SMOLLM2, GEMMA3 = "smollm2", "gemma3-270m"
# Log probabilities of the same model: sums of float32 run in another order.
TOLERANCE = 5e-3
NEW_TOKENS = 8


class Real:
    """A model, its tokenizer, and texts as its tokens."""

    def __init__(self, name: str) -> None:
        try:
            self.model, self.tokenizer = load(str(model_folder(name)))[:2]
        except RealModelError as error:
            pytest.skip(str(error))  # the message says how to get it
        self.model.set_dtype(mx.float32)
        self.name = name
        self.factory = PagedCacheFactory(self.model, max_bytes="2GB")

    def prompt(self, path: str, length: int, start: int = 0) -> list[int]:
        """Tokens of a file of this checkout."""
        tokens: list[int] = self.tokenizer.encode((ROOT / path).read_text(encoding="utf-8"))
        assert len(tokens) >= start + length, path
        return tokens[start : start + length]

    def stock(self, prompt: list[int]) -> Run:
        """What mlx-lm generates."""
        return greedy(self.model, prompt, make_prompt_cache(self.model), NEW_TOKENS)


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3])
def real(request: pytest.FixtureRequest) -> Real:
    return Real(request.param)


@pytest.mark.soak
def test_the_converted_models_know_what_they_should(real: Real) -> None:
    text, tokenizer = "The capital of France is", real.tokenizer
    if real.name == SMOLLM2:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert tokenizer.decode(real.stock(tokens).tokens).startswith(f"{text} Paris.")
    else:
        found = tokenizer.decode(real.stock(tokenizer.encode(text)).tokens)
        assert found.startswith(" the capital of the country of France")


def test_alone_and_in_a_batch_and_behind_a_prefix_it_gets_the_tokens_of_mlx_lm(real: Real) -> None:
    """Windows of Gemma 3 have 512 tokens, so those of the longer prompt wrap."""
    model, factory = real.model, real.factory
    prompts = [
        real.prompt("integrations/paged_cache_factory.py", 30),
        real.prompt("docs/architecture.md", 530),
    ]
    stock = [real.stock(prompt) for prompt in prompts]
    cache = factory.make_cache()
    assert_same_run(greedy(model, prompts[1], cache, NEW_TOKENS), stock[1], TOLERANCE)
    factory.insert_cache(prompts[1], cache)
    with factory:
        generator = BatchGenerator(model, max_tokens=NEW_TOKENS)
        assert_same_runs(runs_of(generator, generator.insert(prompts)), stock, TOLERANCE)
    found, cached = factory.fetch_cache(prompts[1])
    assert cached == 529
    assert_same_run(greedy(model, prompts[1][cached:], found, NEW_TOKENS), stock[1], TOLERANCE)
    assert factory.stats().gather_fallbacks == 0
    del generator, cache, found
    assert_nothing_is_used(factory)


@pytest.mark.soak
def test_drafts_change_no_token(real: Real) -> None:
    # Both repeat what the text repeats.
    prompts = [
        real.prompt("integrations/paged_cache_factory.py", 400, 300),
        real.prompt("docs/claims.md", 500, 300),
    ]
    with real.factory:
        generator = SpeculativeBatchGenerator(
            real.model, NGramDraft(), lengths=FixedLengths(), max_tokens=NEW_TOKENS
        )
        ours = runs_of(generator, generator.insert(prompts))
    assert generator.counts.accepted_tokens > 0
    assert_same_runs(ours, [real.stock(prompt) for prompt in prompts], TOLERANCE)
