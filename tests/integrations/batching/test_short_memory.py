"""A step that MLX has no memory for is repeated in smaller parts, and changes no token.

The n-th allocation of a step fails, for n over the whole step, as Metal's and CUDA's allocators
fail. Or all large ones do, so that only shorter steps go through. Or one sequence gets no memory
at all, and is the only one that ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.server import SamplingArguments

from paged_kv import OutOfMemory, PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.batching.preemption import attach
from paged_kv.integrations.batching.short_memory import LEAST_LASTING
from paged_kv.integrations.grammar.processor import MaskedBatchGenerator
from paged_kv.integrations.prompt_cache_hook import installed_factory
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.kernels.pages.errors import is_shortage
from paged_kv.server.engine.sampling import RandomSampler
from tests.support.drafts import PlannedDraft
from tests.support.failing_allocator import ALL, counted_allocations, failing_allocations
from tests.support.short_of_memory import WHY, fail_where
from tests.support.zoo import small_model

PROMPTS = [[(7 * at + row) % 50 + 1 for at in range(n)] for row, n in enumerate((300, 40, 290))]
NEW_TOKENS = 12
STEP = 128
# A prompt of several steps and a short one; decoding beside prompts; decoding alone.
STEPS = (0, 2, 5)
# Of a step's allocations so many fail, one in each repetition.
MOST = 5

XTC = {"xtc_probability": 0.0, "xtc_threshold": 0.0}

Texts = dict[int, list[int]]


@cache
def written(name: str) -> list[list[int]]:
    """The prompts and what a model writes behind them."""
    with begun(Case(name)) as (generator, uids):
        found = texts(generator, uids)
    return [[*prompt, *found[uid]] for prompt, uid in zip(PROMPTS, uids, strict=True)]


def drafting(name: str, model: Any, **options: Any) -> BatchGenerator:
    """Drafts tokens that are right and wrong, another number for each row."""
    draft = PlannedDraft(written(name), lengths=(1, 4, 2, 3), wrong_every=5)
    return SpeculativeBatchGenerator(model, draft, lengths=FixedLengths(), **options)


def sampling() -> dict[str, Any]:
    """Samplers that count their calls, and processors that see all tokens."""
    options = SamplingArguments(1.0, top_p=0.0, top_k=0, min_p=0.0, **XTC)
    samplers = [RandomSampler(options, [], seed) for seed in range(len(PROMPTS))]
    processors = make_logits_processors(repetition_penalty=1.3)
    return {"samplers": samplers, "logits_processors": [processors] * len(PROMPTS)}


@dataclass(frozen=True)
class Case:
    """A generator whose step fails; `inserted` makes the options of its prompts."""

    model: str
    make: Callable[..., BatchGenerator] = BatchGenerator
    options: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None
    inserted: Callable[[], dict[str, Any]] = dict


CASES = {
    "pages": Case("llama"),
    "q8 pages": Case("llama", options={"page_format": "q8"}),
    "compiled": Case("llama", options={"compile": True}),
    "computed later": Case("llama", backend="plain"),
    "rings": Case("gemma3_text"),
    "hybrid": Case("qwen3_next"),
    "hybrid computed later": Case("qwen3_next", backend="plain"),
    "without pages": Case("mamba2"),
    "rows": Case("deepseek_v41"),
    "one at a time": Case("llama4"),
    "sampled": Case("llama", inserted=sampling),
    "masked": Case("llama", MaskedBatchGenerator),
    "drafts": Case("llama", partial(drafting, "llama")),
    "drafts over rings": Case("gemma3_text", partial(drafting, "gemma3_text")),
    "drafts of a hybrid": Case("qwen3_next", partial(drafting, "qwen3_next")),
}


@contextmanager
def begun(case: Case, **options: Any) -> Iterator[tuple[BatchGenerator, list[int]]]:
    """A generator that has got the prompts, and their uids."""
    model = small_model(case.model)
    factory = PagedCacheFactory(model, max_bytes=256 << 20, **case.options)
    options = {"max_tokens": NEW_TOKENS, "prefill_step_size": STEP, **options}
    sizes = {"prefill_batch_size": 2, "completion_batch_size": 4}
    with factory:
        generator = case.make(model, **sizes, **options)
        yield generator, generator.insert(PROMPTS, **case.inserted())
        factory.pool.check()


def texts(
    generator: BatchGenerator,
    uids: list[int],
    at: int = -1,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Texts:
    """What the generator writes; step number `at` is taken within a context."""
    found: Texts = {uid: [] for uid in uids}
    step = 0
    while True:
        with within() if step == at else nullcontext():
            read, sampled = generator.next()
        for response in sampled:
            found[response.uid].append(response.token)
        step += 1
        if not read and not sampled:
            return found


IN_CI = [("pages", 2), ("hybrid", 2), ("computed later", 0), ("masked", 5), ("drafts", 5)]


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, marks=pytest.mark.slow if (name, at) in IN_CI else pytest.mark.soak)
        for name in CASES
        for at in STEPS
    ],
)
def test_whichever_allocation_fails_all_tokens_are_the_same(
    name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if case.backend is not None:
        monkeypatch.setenv("PAGED_KV_BACKEND", case.backend)
    counts: list[int] = []
    with begun(case) as (generator, uids):
        expected = texts(generator, uids, at, partial(_noted, counts))
    for n in range(0, counts[0], -(-counts[0] // MOST)):
        with begun(case) as (generator, uids), suppress(OfMlxLm), of_mlx_lm():
            assert texts(generator, uids, at, partial(failing_allocations, n)) == expected


class OfMlxLm(Exception):
    """An allocation of mlx-lm's own failed, of a small array that tells the rows of states apart:
    nobody can repeat that."""


@contextmanager
def of_mlx_lm() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if (
            is_shortage(error)
            and "mlx_lm" in traceback.extract_tb(error.__traceback__)[-1].filename
        ):
            raise OfMlxLm from error
        raise


@contextmanager
def _noted(counts: list[int]) -> Iterator[None]:
    with counted_allocations() as found:
        yield
    counts += found


@pytest.mark.parametrize("name", ["pages", pytest.param("hybrid", marks=pytest.mark.soak)])
@pytest.mark.slow
def test_prompts_take_steps_that_there_is_memory_for(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(CASES[name]) as (generator, uids):
        expected = texts(generator, uids)
    # Hidden states of 140 to 300 tokens do not fit, and slabs, which are larger, do.
    width = small_model(CASES[name].model).args.hidden_size * 4
    with (
        begun(CASES[name], prefill_step_size=1024) as (generator, uids),
        caplog.at_level("WARNING"),
    ):
        fails = partial(failing_allocations, 0, ALL, 140 * width, 300 * width)
        assert texts(generator, uids, 0, fails) == expected
        factory: Any = installed_factory(generator.model)
        assert attach(generator, factory).shortages.longest == LEAST_LASTING
        assert generator.prefill_step_size == LEAST_LASTING
    assert "MLX had no memory for a step of" in caplog.text


def contains(token: int, tokens: list[int]) -> bool:
    return token in tokens


def own_token(expected: Texts) -> int:
    """Where the first text has a token that no prompt and no other text has."""
    others = {token for uid in (1, 2) for token in expected[uid]}.union(*PROMPTS)
    return next(at for at, token in enumerate(expected[0]) if token not in others)


def survived(generator: BatchGenerator, uids: list[int]) -> tuple[Texts, list[OutOfMemory]]:
    """What the generator writes, and the errors of the sequences that it removes."""
    found: Texts = {uid: [] for uid in uids}
    errors = []
    while True:
        try:
            read, sampled = generator.next()
        except OutOfMemory as error:
            errors.append(error)
            continue
        for response in sampled:
            found[response.uid].append(response.token)
        if not read and not sampled:
            return found, errors


@pytest.mark.parametrize(
    "name",
    [
        *("pages", "drafts"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "one at a time")),
    ],
)
@pytest.mark.parametrize("is_prompt", [True, False])
@pytest.mark.slow
def test_only_a_sequence_without_memory_for_a_token_ends(
    name: str, is_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(CASES[name]) as (generator, uids):
        expected = texts(generator, uids)
    victim, *others = uids
    emitted = 0
    if is_prompt:
        # In the first prompt's second step.
        poison = min(set(range(100)).difference(*PROMPTS, *expected.values()))
        prompts = [[*PROMPTS[0][:200], poison, *PROMPTS[0][201:]], *PROMPTS[1:]]
    else:
        prompts = PROMPTS
        emitted = own_token(expected) + 1
        poison = expected[victim][emitted - 1]
    monkeypatch.setattr(f"{__name__}.PROMPTS", prompts)
    fail_where(partial(contains, poison), monkeypatch)
    with begun(CASES[name]) as (generator, uids):
        found, errors = survived(generator, uids)
    assert {uid: found[uid] for uid in others} == {uid: expected[uid] for uid in others}
    # The token that cannot be computed was sampled, and is emitted.
    assert found[victim] == expected[victim][:emitted]
    assert [error.uid for error in errors] == [victim]
    assert str(errors[0]).count(WHY) == str(errors[0]).count("MLX has no memory") == 1


def test_a_sequence_that_ends_needs_no_memory_for_its_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with begun(CASES["pages"]) as (generator, uids):
        expected = texts(generator, uids)
    count = own_token(expected) + 1
    fail_where(partial(contains, expected[0][count - 1]), monkeypatch)
    with begun(CASES["pages"], max_tokens=count) as (generator, uids):
        last: list[Any] = []
        while len(last) < len(uids):
            last += [each for each in generator.next()[1] if each.finish_reason is not None]
        first = next(each for each in last if each.uid == 0)
        assert first.finish_reason == "length"
        # What is inserted of it must be computed.
        assert first.prompt_cache[0].size() == len(first.all_tokens)
        assert first.all_tokens == [*PROMPTS[0], *expected[0][: count - 1]]
        generator.next()  # raises nothing
