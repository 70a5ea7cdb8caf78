"""A reproducible factory gives the same request the same bits, whatever else is there."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import NGramDraft, NotReproducible, PagedCacheFactory
from paged_kv.integrations import fixed_steps, fixed_steps_trial
from paged_kv.integrations.speculation.generator import SpeculativeBatchGenerator
from paged_kv.server.engine.sampling import RandomSampler
from paged_kv.steps.sequence import Sequence
from tests.integrations.batching.test_preemption import factory_of_blocks
from tests.support.zoo import small_model

LARGE = 256 << 20
NEW_TOKENS = 36
# MLX computes experts on CPUs in float32 alone.
CASES = [
    *(
        (kind, dtype)
        for kind in ("qwen3", "gemma3_text", "plamo2")
        for dtype in (mx.bfloat16, mx.float16)
    ),
    *((kind, mx.float32) for kind in ("gemma3_text", "qwen3_next", "deepseek_v3", "qwen3_moe")),
]

Bits = list[tuple[int, bytes]]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * at * at + 3 * at + 1 + seed) % 97 for at in range(length)]


# Some begin alike, some within a page; some end at a page's border, or a token behind it.
PROMPTS = [
    prompt(478),
    prompt(473, 1),
    prompt(700),
    prompt(300) + prompt(300, 2),
    prompt(257, 1),
    prompt(258),
    prompt(3, 4),
]


class Options:
    temperature, top_p, top_k, min_p = 1.0, 0.9, 4, 0.0
    xtc_probability, xtc_threshold = 0.0, 0.0


def model_of(kind: str, dtype: mx.Dtype) -> Any:
    model: Any = small_model(kind)
    model.set_dtype(dtype)
    return model


class Requests:
    """Asks a factory's model for the answers to some of PROMPTS, at once."""

    def __init__(self, model: Any, asked: list[int], chance: random.Random) -> None:
        sizes: Any = {"completion_batch_size": chance.choice([3, 8, 16]), "prefill_batch_size": 4}
        step = chance.choice([100, 256, 2048])
        self._generator: Any = BatchGenerator(model, **sizes, prefill_step_size=step)
        options: Any = Options()
        uids = self._generator.insert(
            [PROMPTS[each] for each in asked],
            max_tokens=[NEW_TOKENS] * len(asked),
            samplers=[RandomSampler(options, [], seed=each) for each in asked],
        )
        self._asked = dict(zip(uids, asked, strict=True))

    def answers(self, aborted: set[int] = frozenset()) -> dict[int, Bits]:  # type: ignore[assignment]
        """The tokens and log-probabilities of all but some, which are aborted on the way."""
        found: dict[int, Bits] = {each: [] for each in self._asked.values()}
        steps = 0
        while responses := self._generator.next_generated():
            for each in responses:
                each.prompt_cache = None
                logprobs = each.logprobs.astype(mx.float32)
                found[self._asked[each.uid]].append((each.token, bytes(memoryview(logprobs))))
            steps += 1
            if steps == 5:
                self._generator.remove([uid for uid, at in self._asked.items() if at in aborted])
        return {at: bits for at, bits in found.items() if at not in aborted}


@cache
def alone(kind: str, dtype: mx.Dtype, page_format: str, reproducible: bool) -> list[Bits]:
    """What each of PROMPTS gives alone, with nothing cached."""
    model, found = model_of(kind, dtype), []
    for at in range(len(PROMPTS)):
        options: Any = {"page_format": page_format, "reproducible": reproducible}
        with PagedCacheFactory(model, max_bytes=LARGE, **options):
            found.append(Requests(model, [at], random.Random(at)).answers()[at])
    return found


def differing(
    folder: Path, kind: str, dtype: mx.Dtype, page_format: str, rounds: int, reproducible: bool
) -> tuple[int, int, int]:
    """In how many answers of random schedules any bit differs, how many tokens were found cached,
    and how often a sequence was preempted: with any company, with what memory
    and a store hold, after preemptions and restarts, and beside some that are aborted."""
    expected = alone(kind, dtype, page_format, reproducible)
    model, chance, wrong = model_of(kind, dtype), random.Random(1), 0
    hits = preemptions = 0
    for _ in range(rounds):
        factory = factory_of_blocks(model, 8, page_format, store=folder, reproducible=reproducible)
        factory.decode_share = chance.choice([None, 0.5])
        factory.install(keep_prompts=True)
        for _ in range(3):
            asked = chance.sample(range(len(PROMPTS)), chance.randint(1, len(PROMPTS)))
            aborted = {each for each in asked if chance.random() < 0.2}
            answers = Requests(model, asked, chance).answers(aborted)
            wrong += sum(bits != expected[at] for at, bits in answers.items())
            if chance.random() < 0.3:
                factory.clear()
        stats = factory.stats()
        hits += stats.prefix_hits
        preemptions += stats.preemptions
        factory.close()
    return wrong, hits, preemptions


def test_no_schedule_changes_a_bit(tmp_path: Path) -> None:
    found = differing(tmp_path, "qwen3", mx.float32, "fp16", 1, reproducible=True)
    wrong, hits, preemptions = found
    assert wrong == 0 < min(hits, preemptions)


@pytest.mark.slow
def test_without_it_schedules_change_bits(tmp_path: Path) -> None:
    wrong, *_ = differing(tmp_path, "qwen3", mx.float32, "fp16", 2, reproducible=False)
    assert wrong > 0


@pytest.mark.slow
@pytest.mark.parametrize("page_format", ["fp16", "q4"])
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_no_kind_of_model_changes_a_bit(
    tmp_path: Path, kind: str, dtype: mx.Dtype, page_format: str
) -> None:
    wrong, hits, _ = differing(tmp_path, kind, dtype, page_format, 1, reproducible=True)
    assert wrong == 0 < hits


def test_only_what_was_computed_as_a_prompt_is_found() -> None:
    model = model_of("qwen3", mx.float32)
    factory = PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    tokens, prompt_cache = prompt(600), factory.make_cache()
    model(mx.array([tokens[:300]]), cache=prompt_cache)
    for token in tokens[300:]:
        model(mx.array([[token]]), cache=prompt_cache)
    assert factory.insert_cache(tokens, prompt_cache) == 256
    _, cached = factory.fetch_cache(tokens)
    assert cached == 256


def test_a_call_that_fails_within_a_prompt_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3", mx.float32)
    factory = PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    prompt_cache = factory.make_cache()
    model(mx.array([prompt(256)]), cache=prompt_cache)
    calls = []

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sequence, "record_piece", fails)
    with pytest.raises(KeyboardInterrupt):
        model(mx.array([prompt(700)]), cache=prompt_cache)
    assert {each.offset for each in prompt_cache} == {256}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"page_format": "auto"}),
        ("qwen3", {"compile": True}),
        ("mamba", {}),
        ("deepseek_v32", {}),
    ],
)
def test_what_depends_on_others_is_refused(kind: str, options: Any) -> None:
    with pytest.raises(NotReproducible):
        PagedCacheFactory(small_model(kind), max_bytes=LARGE, reproducible=True, **options)


def test_drafts_and_other_arguments_are_refused() -> None:
    model: Any = model_of("qwen3", mx.float32)
    with PagedCacheFactory(model, max_bytes=LARGE, reproducible=True) as factory:
        with pytest.raises(NotReproducible):
            SpeculativeBatchGenerator(model, NGramDraft()).insert([prompt(9)])
        with pytest.raises(NotReproducible):
            model(mx.array([prompt(9)]), factory.make_cache(), mx.zeros((1, 9, 64)))


@pytest.mark.slow
def test_a_device_is_tried_once_and_refused_if_rows_change_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = small_model("qwen3", hidden_size=576, intermediate_size=1536)
    with monkeypatch.context() as patch:
        # As on a device whose products depend on the number of rows, even of full steps.
        patch.setattr(fixed_steps, "_cut", _unfilled)
        with pytest.raises(NotReproducible):
            PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    monkeypatch.delattr(fixed_steps_trial, "_different")
    PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)


def _unfilled(batch: Any, rows: int) -> Any:
    numbers = [*range(len(batch.sequences))]
    yield fixed_steps._Rows(batch.sequences, numbers, len(numbers))
