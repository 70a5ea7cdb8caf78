"""Batches in budgets of few blocks: what fits alone waits for its turn, whatever prompts share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from paged_kv import (
    NGramDraft,
    PoolExhausted,
    PromptCacheTaken,
    SpeculativeBatchGenerator,
    generate_samples,
)
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from tests.integrations.batching.test_preemption import factory_of_blocks, generator_of
from tests.integrations.batching.test_shared_prefill import noted_tokens
from tests.support.examples import examples
from tests.support.generation import (
    Run,
    assert_nothing_is_used,
    assert_same_run,
    greedy,
    runs_of,
)
from tests.support.zoo import small_model

TOLERANCE = 2e-3
TEXTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(800)] for k in range(2)]


class Tokenizer:
    """Leaves tokens as they are."""

    eos_token_ids: tuple[int, ...] = ()

    def encode(self, tokens: list[int]) -> list[int]:
        return tokens

    def decode(self, tokens: list[int]) -> list[int]:
        return tokens


def last_response(generator: BatchGenerator) -> Any:
    """The response that ends a sequence, and nothing else of it."""
    while True:
        for response in generator.next_generated():
            if response.finish_reason is not None:
                return response


def test_a_prompt_cache_that_was_read_is_the_callers() -> None:
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 2)
    with factory:
        generator = generator_of(model)
        generator.insert([text[:300] for text in TEXTS], max_tokens=[3, 3])
        response = last_response(generator)
        cache = response.prompt_cache
        assert cache[0].size() == len(response.all_tokens)
        with pytest.raises(PoolExhausted):
            generator.next_generated()
        assert response.prompt_cache is cache
        del cache, response
        assert last_response(generator).uid == 1
        generator.close()
    assert_nothing_is_used(factory)


def test_a_newcomer_does_not_wait_for_a_prompt_cache_that_nobody_has_read() -> None:
    """The second one runs on when the first has ended, and the third one needs a block."""
    model = small_model("qwen3")
    factory = factory_of_blocks(model, 2)
    with factory:
        generator = generator_of(model)
        generator.insert([text[:100] for text in TEXTS], max_tokens=[3, 100])
        ended = last_response(generator)
        generator.insert([[5] * 100], max_tokens=[3])
        assert last_response(generator).uid == 2
        with pytest.raises(PromptCacheTaken):
            _ = ended.prompt_cache
        generator.remove([1])
        generator.close()
    assert_nothing_is_used(factory)


@pytest.mark.slow
def test_prompts_inserted_into_a_full_pool_share_their_beginning_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The running sequence leaves too few blocks until it ends."""
    model: Any = small_model("qwen3")
    prompts = [[*TEXTS[0][:600], row] for row in range(2)]
    expected = [greedy(model, each, make_prompt_cache(model), 5).tokens for each in prompts]
    factory = factory_of_blocks(model, 4)
    factory.can_admit(0)
    with factory:
        generator = generator_of(model)
        running = generator.insert([TEXTS[1][:760]], max_tokens=[30])
        assert generator.next_generated()
        # What two prompts share takes three blocks.
        assert factory.stats().blocks_used == 3
        computed = noted_tokens(model, monkeypatch)
        uids = generator.insert(prompts, max_tokens=[5, 5])
        _, *runs = runs_of(generator, [*running, *uids])
        generator.close()
    assert [run.tokens for run in runs] == expected
    assert sum(computed) < 900, "the prompts were computed one by one"
    assert_nothing_is_used(factory)


@pytest.mark.parametrize(
    ("length", "blocks"), [(513, 3), pytest.param(700, 4, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_samples_wait_whose_caller_holds_the_prompt(length: int, blocks: int) -> None:
    """With these blocks one sample fits beside the prompt. Samples cannot be preempted, as nobody
    told BatchGenerator their prompt."""
    model: Any = small_model("qwen3")
    prompt, tokenizer = TEXTS[0][:length], Tokenizer()
    expected = greedy(model, prompt, make_prompt_cache(model), 12).tokens
    factory = factory_of_blocks(model, blocks)
    with factory:
        cache = factory.make_cache()
        found: Any = generate_samples(
            model,
            tokenizer,
            prompt,
            3,
            prompt_cache=cache,
            max_tokens=12,
            sampler=make_sampler(temp=0.0),
        )
    assert found.texts == [expected] * 3
    del cache
    assert_nothing_is_used(factory)


@pytest.mark.slow
def test_who_can_be_preempted_makes_room_for_who_cannot() -> None:
    """The second one's prompt is unknown. The first one grows into what was promised to it."""
    model: Any = small_model("qwen3")
    prompts, most = (TEXTS[0][:475], TEXTS[1][:471]), [60, 60]
    factory = factory_of_blocks(model, 5)
    with factory:
        cache = factory.make_cache()
        model(mx.array([prompts[1][:470]]), cache=cache)
        mx.eval([layer.state for layer in cache])
        generator = generator_of(model)
        caches: Any = [None, cache]
        uids = generator.insert([prompts[0], prompts[1][470:]], max_tokens=most, caches=caches)
        del cache, caches
        first, second = runs_of(generator, uids)
        generator.close()
    assert len(first.tokens) == most[0]
    assert second.tokens == greedy(model, prompts[1], make_prompt_cache(model), most[1]).tokens
    assert factory.stats().preemptions == 1
    assert_nothing_is_used(factory)


@dataclass(frozen=True)
class Request:
    """A prompt, that begins with so many tokens of a text and goes on with its own, the number of
    tokens of its answer, and the steps between the request before it and this one."""

    text: int
    shared: int
    own: int
    new_tokens: int
    after: int

    @property
    def prompt(self) -> list[int]:
        own = [(5 * i + self.shared + self.new_tokens) % 97 for i in range(self.own)]
        return [*TEXTS[self.text][: self.shared], *own] or [1]

    @property
    def blocks(self) -> int:
        """That it needs alone."""
        return -(-(len(self.prompt) + self.new_tokens) // PAGE_SIZE)


@dataclass(frozen=True)
class History:
    """What a batch is asked for, in blocks besides those of the largest request.

    `removed` is a request that is removed, and after how many steps, if there is such a one.
    """

    requests: list[Request]
    spare: float
    places: int
    step_size: int
    drafts: bool
    reads: bool
    removed: tuple[int, int]


LENGTHS = st.sampled_from([0, 1, 215, 255, 256, 257, 470, 511, 512, 513, 600, 700])
REQUESTS = st.builds(
    Request,
    text=st.integers(0, 1),
    shared=LENGTHS,
    own=st.sampled_from([0, 1, 2, 24, 100, 256, 290]),
    new_tokens=st.sampled_from([1, 2, 30, 60]),
    after=st.sampled_from([0, 0, 0, 3, 40]),
)
HISTORIES = st.builds(
    History,
    requests=st.lists(REQUESTS, min_size=2, max_size=5),
    spare=st.sampled_from([0, 0, 0.5, 1, 2]),
    places=st.sampled_from([8, 4, 2, 1]),
    step_size=st.sampled_from([2048, 512, 256, 100]),
    drafts=st.booleans(),
    reads=st.booleans(),
    removed=st.tuples(st.integers(0, 9), st.integers(1, 60)),
)


def generator_for(model: Any, history: History) -> BatchGenerator:
    sizes: dict[str, Any] = {
        "completion_batch_size": history.places,
        "prefill_batch_size": min(4, history.places),
        "prefill_step_size": history.step_size,
    }
    if not history.drafts:
        return BatchGenerator(model, **sizes)
    return SpeculativeBatchGenerator(model, NGramDraft(), lengths=FixedLengths(), **sizes)


def insertions(history: History) -> Iterator[tuple[int, list[Request]]]:
    """The requests that are inserted together, and after how many steps."""
    at, together = 0, history.requests[:1]
    for request in history.requests[1:]:
        if request.after:
            yield at, together
            at, together = at + request.after, []
        together.append(request)
    yield at, together


def responses_of(model: Any, history: History) -> dict[int, list[Any]]:
    """What a batch gives for each request. As in mlx-lm's own loops, the responses of a step are
    held during the next one."""
    generator = generator_for(model, history)
    given: dict[int, list[Any]] = {}
    coming, step = list(insertions(history)), 0
    responses: list[Any] = []
    while coming or responses:
        if coming and (not responses or step >= coming[0][0]):
            _, requests = coming.pop(0)
            prompts = [request.prompt for request in requests]
            most = [request.new_tokens for request in requests]
            given |= {uid: [] for uid in generator.insert(prompts, max_tokens=most)}
        responses = generator.next_generated()
        for response in responses:
            if history.reads and response.finish_reason is not None:
                assert response.prompt_cache[0].size() == len(response.all_tokens)
                response.prompt_cache = None
            if response.uid in given:
                given[response.uid].append((response.token, response.logprobs))
        step += 1
        if step == history.removed[1]:
            generator.remove([uid for uid in given if uid == history.removed[0]])
    generator.close()
    return given


@pytest.mark.slow
@given(history=HISTORIES)
@examples(5)
def test_what_fits_alone_is_served(history: History) -> None:
    assert_served("qwen3", history)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1", "deepseek_v3"])
@given(history=HISTORIES)
@examples(10)
def test_what_fits_alone_is_served_by_each_family(name: str, history: History) -> None:
    assert_served(name, history)


def assert_served(name: str, history: History) -> None:
    model: Any = small_model(name)
    blocks = max(request.blocks for request in history.requests) + history.spare
    factory = factory_of_blocks(model, blocks)
    with factory:
        given = responses_of(model, history)
    for uid, request in enumerate(history.requests):
        tokens = [token for token, _ in given[uid]]
        assert len(tokens) == request.new_tokens or uid == history.removed[0]
        if tokens:
            run = Run(tokens, mx.stack([logprobs for _, logprobs in given[uid]]))
            cold = greedy(model, request.prompt, make_prompt_cache(model), len(tokens))
            assert_same_run(run, cold, TOLERANCE)
    assert_nothing_is_used(factory)
