"""A batch with drafts emits what a batch without drafts emits."""

import contextlib
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, StopSequences

from paged_kv import PagedCacheFactory, PoolExhausted, SpeculativeBatchGenerator
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.speculation.drafts import Draft
from tests.support.drafts import PlannedDraft
from tests.support.generation import Run, assert_nothing_is_used, assert_same_runs, runs_of
from tests.support.zoo import small_model

# The model verifies several tokens at a time, so float32 sums have another order.
TOLERANCE = 2e-3
LENGTHS = (3, 70, 1, 260, 17)
PROMPTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
NEW_TOKENS = 24
RAGGED = (0, 3, 1, 4, 2)


def undrafted(model: Any, factory: PagedCacheFactory, **options: Any) -> list[Run]:
    """The runs of the prompts in a batch without drafts."""
    with factory:
        generator = BatchGenerator(model, max_tokens=NEW_TOKENS, completion_batch_size=4)
        return runs_of(generator, generator.insert(PROMPTS, **options))


def fixed(model: Any, draft: Draft, **options: Any) -> SpeculativeBatchGenerator:
    """A generator that drafts whatever the times of its steps are."""
    return SpeculativeBatchGenerator(model, draft, lengths=FixedLengths(), **options)


def drafted(
    model: Any, factory: PagedCacheFactory, draft: Draft, **options: Any
) -> tuple[list[Run], SpeculativeBatchGenerator]:
    """The same with drafts: more prompts than rows, so some begin when others end."""
    with factory:
        generator = fixed(model, draft, max_tokens=NEW_TOKENS, completion_batch_size=4)
        return runs_of(generator, generator.insert(PROMPTS, **options)), generator


def texts_of(runs: list[Run]) -> list[list[int]]:
    return [prompt + run.tokens for prompt, run in zip(PROMPTS, runs, strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3_text", "jamba")),
        pytest.param("deepseek_v3", marks=pytest.mark.soak),
    ],
)
@pytest.mark.slow
def test_ragged_drafts_change_nothing(name: str) -> None:
    """With recurrent layers that leave padding out, a window, and some that take padding in."""
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    stock = undrafted(model, factory)
    draft = PlannedDraft(texts_of(stock), RAGGED, wrong_every=7)
    ours, generator = drafted(model, factory, draft)
    assert_same_runs(ours, stock, TOLERANCE)
    counts = generator.counts
    assert 0 < counts.drafts < counts.accepted_tokens < counts.draft_tokens
    del generator
    factory.clear()
    assert_nothing_is_used(factory)


@pytest.mark.slow
def test_no_more_is_drafted_than_a_ring_can_roll_back() -> None:
    model = small_model("gemma3_text")
    factory = PagedCacheFactory(model, max_bytes=64 << 20, write_chunk=3)
    stock = undrafted(model, factory)
    ours, generator = drafted(model, factory, PlannedDraft(texts_of(stock), (4,), wrong_every=2))
    assert_same_runs(ours, stock, TOLERANCE)
    assert 0 < generator.counts.draft_tokens <= 2 * generator.counts.drafts


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("llama")


@pytest.fixture
def llama_factory(model: Any) -> PagedCacheFactory:
    return PagedCacheFactory(model, max_bytes=64 << 20)


@pytest.fixture(scope="module")
def stock(model: Any) -> list[Run]:
    return undrafted(model, PagedCacheFactory(model, max_bytes=64 << 20))


def test_a_row_ends_at_its_stop_sequence_and_its_cache_holds_no_token_more(
    model: Any, llama_factory: PagedCacheFactory, stock: list[Run]
) -> None:
    """The stop sequence ends among tokens that the step accepts."""
    cut = 8
    stops = [StopSequences([run.tokens[cut - 2 : cut]]) for run in stock]
    draft = PlannedDraft(texts_of(stock))
    with llama_factory:
        generator = fixed(model, draft, max_tokens=NEW_TOKENS)
        generator.insert(PROMPTS, stop_sequences=stops)
        responses = []
        while found := generator.next_generated():
            responses += found
    last = {each.uid: each for each in responses if each.finish_reason}
    given = Counter(each.uid for each in responses)
    for uid, (prompt, run) in enumerate(zip(PROMPTS, stock, strict=True)):
        text = run.tokens[: given[uid]]
        assert text[-2:] == run.tokens[cut - 2 : cut]
        assert last[uid].finish_reason == "stop"
        assert last[uid].all_tokens == prompt + text
        assert {cache.offset for cache in last[uid].prompt_cache or []} == {len(prompt + text)}


class Counting:
    """A logits processor that bans the token that follows each seventh, and notes its contexts."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        context: Any = tokens.tolist()
        self.contexts.append(context)
        if len(context) % 7:
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == mx.argmax(logits), -mx.inf, logits)


@pytest.mark.slow
def test_logits_processors_see_the_tokens_that_they_would_see_without_drafts(
    model: Any, llama_factory: PagedCacheFactory, stock: list[Run]
) -> None:
    without, with_drafts = Counting(), Counting()
    rows = range(len(PROMPTS))
    # Only one row has a processor: the others are sampled together.
    expected = undrafted(
        model, llama_factory, logits_processors=[[without] if row == 3 else None for row in rows]
    )
    ours, generator = drafted(
        model,
        llama_factory,
        PlannedDraft(texts_of(expected), RAGGED, wrong_every=5),
        logits_processors=[[with_drafts] if row == 3 else None for row in rows],
    )
    assert_same_runs(ours, expected, TOLERANCE)
    assert expected[3].tokens != stock[3].tokens
    assert generator.counts.accepted_tokens
    # The generator without drafts samples one token more, which it never emits.
    assert with_drafts.contexts[:NEW_TOKENS] == without.contexts[:NEW_TOKENS]


class Seeded:
    """A sampler with random numbers of its own: one per call."""

    def __init__(self, seed: int) -> None:
        self._key = mx.random.key(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(logprobs, key=key)


@pytest.mark.slow
def test_a_seeded_row_samples_the_same_tokens_with_and_without_drafts(
    model: Any, llama_factory: PagedCacheFactory
) -> None:
    rows = range(len(PROMPTS))
    expected = undrafted(model, llama_factory, samplers=[Seeded(row) for row in rows])
    draft = PlannedDraft(texts_of(expected), RAGGED, wrong_every=5)
    ours, generator = drafted(model, llama_factory, draft, samplers=[Seeded(row) for row in rows])
    assert_same_runs(ours, expected, TOLERANCE)
    assert 0 < generator.counts.accepted_tokens < generator.counts.draft_tokens


def test_a_row_without_memory_for_drafts_goes_on_without_them() -> None:
    """Drafts reach the border of a page before the token does that needs the next one."""
    model = small_model("qwen3")  # one group of layers, so that a full pool has no page left
    prompt = PROMPTS[3][:247]
    factory = PagedCacheFactory(model, max_bytes=4 << 20)
    with factory:
        plain = BatchGenerator(model, max_tokens=NEW_TOKENS)
        (expected,) = runs_of(plain, plain.insert([prompt]))
        draft = PlannedDraft([prompt + expected.tokens])
        generator = fixed(model, draft, max_tokens=NEW_TOKENS)
        generator.insert([prompt])
        given = [each.token for each in generator.next_generated()]
        others = full_pool(model, factory)
        while len(given) < 9:
            given += [each.token for each in generator.next_generated()]
        # One step of five tokens; the next one would have written up to token 257.
        assert (generator.counts.drafts, len(given)) == (1, 9)
        with pytest.raises(PoolExhausted):
            generator.next_generated()
        others.clear()
        (rest,) = runs_of(generator, [0])
    assert given + rest.tokens == expected.tokens


def full_pool(model: Any, factory: PagedCacheFactory) -> list[Any]:
    """Caches that take all memory that is left."""
    others: list[Any] = []
    with contextlib.suppress(PoolExhausted):
        while True:
            others.append(factory.make_cache())
            model(mx.array([[1]]), cache=others[-1])
    return others


def test_steps_without_drafts_are_timed_first(
    model: Any, llama_factory: PagedCacheFactory, stock: list[Run]
) -> None:
    """Lengths adapt by default, and tokens are the same however many are drafted."""
    with llama_factory:
        generator = SpeculativeBatchGenerator(
            model, PlannedDraft(texts_of(stock), wrong_every=5), max_tokens=NEW_TOKENS
        )
        uids = generator.insert(PROMPTS[:1])
        first = [each.token for _ in range(2) for each in generator.next_generated()]
        assert not generator.counts.drafts
        (rest,) = runs_of(generator, uids)
    assert first + rest.tokens == stock[0].tokens
    assert len(first) == 2


class Recorded(FixedLengths):
    """Records the kinds of steps that it is told of."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def record(self, rows: int, tokens: int, seconds: float) -> None:
        assert seconds > 0
        self.steps.append((rows, tokens))


def test_lengths_are_told_of_each_step_and_of_none_that_began_while_others_drafted(
    model: Any, llama_factory: PagedCacheFactory, stock: list[Run]
) -> None:
    lengths = Recorded()
    draft = PlannedDraft(texts_of(stock)[:1], (2, 0, 0, 0))
    with llama_factory:
        generator = SpeculativeBatchGenerator(model, draft, lengths=lengths, max_tokens=9)
        generator.insert(PROMPTS[:1])
        while generator.next_generated():
            pass
    # 3 + 1 + 3 + 1 + 1 tokens: of the steps without drafts only the last one follows another.
    assert lengths.steps == [(1, 3), (1, 3), (1, 1)]


@pytest.mark.slow
def test_sampled_tokens_have_the_models_distribution() -> None:
    """Chi-squared of the second token, given the first, over a vocabulary of 8; the draft proposes
    the same token always."""
    model = small_model("llama", vocab_size=8)
    factory = PagedCacheFactory(model, max_bytes=256 << 20)
    prompt, rows = [1, 2, 3, 4, 5], 250
    likely = int(mx.argmax(model(mx.array([prompt]))[0, -1]))
    mx.random.seed(7)
    with factory:
        generator = SpeculativeBatchGenerator(
            model,
            PlannedDraft([[*prompt, first, likely, likely] for first in range(8)]),
            lengths=FixedLengths(),
            max_tokens=3,
            sampler=mx.random.categorical,
            completion_batch_size=rows,
            prefill_batch_size=rows,
        )
        runs = runs_of(generator, generator.insert([prompt] * rows))
    counts = generator.counts
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    statistic = degrees = 0.0
    by_first = Counter(run.tokens[0] for run in runs)
    for first, total in by_first.items():
        chances: Any = mx.softmax(model(mx.array([[*prompt, first]]))[0, -1]).tolist()
        seen = Counter(run.tokens[1] for run in runs if run.tokens[0] == first)
        common = [token for token in range(8) if total * chances[token] >= 4]
        for token in common:
            expected = total * chances[token]
            statistic += (seen[token] - expected) ** 2 / expected
        degrees += max(0, len(common) - 1)
    # The seed is fixed. 99.9 % of samples lie below mean plus 3.5 deviations.
    assert degrees >= 3
    assert statistic < degrees + 3.5 * (2 * degrees) ** 0.5
