"""Decode steps that are recorded once and repeated without Python give the same tokens."""

import gc
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

from benches.model_families import alone, attempt, batched
from paged_kv import PagedCacheFactory
from paged_kv.integrations.compiled import recordings as recordings_module
from paged_kv.integrations.compiled.recordings import TRIAL_STEPS, Comparisons, Recordings
from paged_kv.kernels.pages.backend import StepRecorder
from paged_kv.steps.recorded import RecordedStep
from tests.support.zoo import FAMILIES, small_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
POOL_BYTES = 64 << 20
# Why models of `FAMILIES` take no recording.
REASONS = {"minimax_m3_vl": "it lets keys or values in its cache wait for other arrays"}


_is_due = Comparisons.is_due

# MLX compiles dozens of kernels with the compiler of C++.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _only_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain operations, and without steps of Python between: what is wrong shows."""
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    monkeypatch.setattr(Comparisons, "is_due", lambda self, is_first: False)


def new_factory(model: Any, *, compile: bool | None = True, **options: Any) -> PagedCacheFactory:
    return PagedCacheFactory(model, compile=compile, **{"max_bytes": POOL_BYTES} | options)


def recordings_of(factory: PagedCacheFactory) -> Recordings:
    return factory.recordings[factory.pool]


def small_llama(cls: type[Any] | None = None, **members: Any) -> Any:
    """A llama of one layer, with another class of its own where one is given."""
    model: Any = small_model("llama", num_hidden_layers=1, layer_types=["full_attention"])
    if cls is not None:
        model.__class__ = type(cls.__name__, (cls,), members)
    return model


def greedy(model: Any, prompt: list[int], cache: list[Any], count: int) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache)
    return [int(token) for token, _ in steps]


def both(
    model: Any, run: Callable[[PagedCacheFactory], Any] | None = None, **options: Any
) -> tuple[Any, Any, Recordings]:
    """What a run gives without recordings, and with them; a few tokens if none is given."""
    run = run or (lambda each: greedy(model, PROMPT, each.make_cache(), 6))
    factory = new_factory(model, **options)
    return run(new_factory(model, compile=False, **options)), run(factory), recordings_of(factory)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("llama", "qwen3_next", *REASONS)
        else pytest.param(name, marks=pytest.mark.soak)
        for name in FAMILIES
    ],
)
def test_tokens_are_those_of_steps_that_python_takes(name: str) -> None:
    """Alone, and in a ragged batch whose rows come and go."""
    model = small_model(name)

    def run(factory: PagedCacheFactory) -> Any:
        make = factory.make_cache
        return alone(model, make), attempt(lambda: batched(model, make))

    expected, got, recordings = both(model, run)
    assert got == expected
    assert recordings.reason == REASONS.get(name)
    assert (recordings.repeated > 20) == (name not in REASONS)


@pytest.mark.parametrize(
    ("name", "page_format"),
    [
        ("llama", "q8"),
        ("qwen3_next", "fp16"),
        pytest.param("gemma3_text", "q8", marks=pytest.mark.soak),
        pytest.param("deepseek_v3", "fp16", marks=pytest.mark.soak),
    ],
)
def test_pages_that_fill_and_windows_that_wrap(name: str, page_format: str) -> None:
    """The steps between, which copy, recode or map pages, are as without recordings."""
    model = small_model(name)
    prompt = [(5 * i + i * i) % 97 for i in range(250)]

    def run(factory: PagedCacheFactory) -> Any:
        return greedy(model, prompt, factory.make_cache(), 10)

    expected, got, recordings = both(model, run, page_format=page_format)
    assert got == expected
    assert recordings.repeated >= 7


@pytest.mark.parametrize(
    ("time", "offset", "serves"), [(0.9, 0, True), (1.1, 0, False), (0.9, 1, False)]
)
def test_recordings_serve_once_they_were_right_and_faster(
    time: float, offset: int, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGED_KV_COMPILE")
    monkeypatch.setattr(StepRecorder, "pays", True)
    monkeypatch.setattr(recordings_module, "median", lambda times: time)
    right = RecordedStep.offset_of
    monkeypatch.setattr(RecordedStep, "offset_of", lambda step, at: right(step, at) - offset)
    model = small_llama()
    got, expected = (new_factory(model, compile=each) for each in (None, False))
    tokens = [greedy(model, PROMPT, each.make_cache(), 16) for each in (got, expected)]
    assert tokens[0] == tokens[1]
    recordings = recordings_of(got)
    assert (recordings.reason is None) == (recordings.repeated > recordings.compared) == serves
    assert recordings.compared == (2 if offset else TRIAL_STEPS + 1)


@pytest.mark.parametrize("page_format", ["fp16", "q8"])
def test_steps_that_choose_what_they_read(page_format: str) -> None:
    """From the fifth on, and over the end of a page. Recordings made before do not serve them."""
    model = small_model("qwen3")
    prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(1020)]

    def run(factory: PagedCacheFactory) -> Any:
        tokens = greedy(model, prompt, factory.make_cache(), 14)
        stats = factory.stats()
        return tokens, stats.tokens_chosen, stats.tokens_left_out

    expected, got, recordings = both(model, run, read_tokens=1024, page_format=page_format)
    assert got == expected
    assert expected[2] > 0
    assert (recordings.count, recordings.reason) == (2, None)
    assert recordings.repeated >= 10


def test_steps_of_padding_are_not_recorded() -> None:
    model = small_model("llama")

    def run(factory: PagedCacheFactory) -> Any:
        rows = [factory.make_cache() for _ in range(2)]
        for row in rows:
            for tokens in (PROMPT, [7]):
                mx.eval(model(mx.array([tokens]), cache=row))
        cache = [one.merge([one, other]) for one, other in zip(*rows, strict=True)]
        for each in cache:
            each.prepare(lengths=[4, 1], right_padding=[0, 3])
        for one, other in ((5, 9), (6, 0), (7, 0), (8, 0)):
            mx.eval(model(mx.array([[one], [other]]), cache=cache))
        for each in cache:
            each.finalize()
        logits = [model(mx.array([[3], [token]]), cache=cache) for token in range(3)]
        return mx.argmax(mx.stack(logits), axis=-1).tolist()

    expected, got, recordings = both(model, run)
    assert got == expected
    assert recordings.repeated == 2 + 3


def test_threads_have_recordings_of_their_own() -> None:
    model = small_llama()
    expected = greedy(model, PROMPT, new_factory(model, compile=False).make_cache(), 8)
    factory = new_factory(model)
    mine = mx.new_stream(mx.default_device())

    def work(stream: mx.Stream | None = None) -> list[int]:
        with mx.stream(stream or mx.new_stream(mx.default_device())):
            return greedy(model, PROMPT, factory.make_cache(), 8)

    got, alone = [work(mine)], recordings_of(factory).count
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            got.append(thread.submit(work).result())
    assert [*got, work(mine)] == [expected] * 4
    assert recordings_of(factory).count == 3 * alone > 0


class AsksForNumbers(llama.Model):
    """A llama that makes a constant of the number of tokens in its cache, as some models do."""

    asks: Any

    def __call__(self, inputs: mx.array, cache: Any = None, **options: Any) -> Any:  # type: ignore[override]
        logits: Any = super().__call__(inputs, cache, **options)
        return logits if cache is None else logits + type(self).asks(cache[0], logits)


def _of_the_keys(cache: Any, logits: mx.array) -> Any:
    keys, _ = cache.keys_and_values()
    return mx.zeros_like(logits) + keys.shape[2] / 100


@pytest.mark.parametrize(
    ("asks", "reason"),
    [
        (_of_the_keys, "had other logits"),
        (lambda cache, logits: logits * cache.size(), "asks its cache for `size`"),
        (lambda cache, logits: logits * mx.array(cache.offset).max().item(), "eval"),
        (lambda cache, logits: logits * cache.keys_and_values()[0].sum(), "eval"),
    ],
)
def test_a_model_that_asks_for_numbers_is_not_compiled(
    asks: Any, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any step has logits of a recording."""
    monkeypatch.setattr(Comparisons, "is_due", _is_due)
    model = small_llama_that(asks)
    factory = new_factory(model)
    cache = factory.make_cache()
    with caplog.at_level(logging.INFO, logger="paged_kv"):
        for token in (PROMPT, [1], [2], [3]):
            mx.eval(model(mx.array([token]), cache=cache))
    recordings = recordings_of(factory)
    assert reason in str(recordings.reason)
    assert recordings.repeated == recordings.compared
    assert sum("are not compiled" in each.getMessage() for each in caplog.records) == 1


def small_llama_that(asks: Any) -> Any:
    return small_llama(AsksForNumbers, asks=staticmethod(asks))


class Counts(llama.Model):
    """A llama that counts its steps in an array of its own."""

    def __call__(self, inputs: mx.array, cache: Any = None, **options: Any) -> Any:  # type: ignore[override]
        self.steps = getattr(self, "steps", mx.zeros(())) + 1
        return super().__call__(inputs, cache, **options) * self.steps


def test_a_model_that_counts_its_steps_goes_on_counting() -> None:
    model = small_llama(Counts)
    factory = new_factory(model)
    cache = factory.make_cache()
    model.steps = mx.zeros(())
    for token in (PROMPT, [1], [2], [3]):
        mx.eval(model(mx.array([token]), cache=cache))
    assert model.steps.item() == 4
    assert recordings_of(factory).reason is not None


def test_a_model_may_ask_for_positions_after_its_write() -> None:
    def of_the_positions(cache: Any, logits: mx.array) -> Any:
        positions = mx.array(cache.offset).reshape(-1, 1, 1)
        return 9 * mx.sin(positions * mx.arange(logits.shape[-1]))

    expected, got, recordings = both(small_llama_that(of_the_positions))
    assert got == expected
    assert recordings.repeated >= 4


def test_another_model_of_the_class_takes_no_recording() -> None:
    model, other = small_model("llama"), small_model("llama", seed=1)
    factory = new_factory(model)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 4)
    expected = greedy(other, PROMPT, new_factory(other, compile=False).make_cache(), 8)
    assert greedy(other, PROMPT, factory.make_cache(), 8) == expected


def test_keys_and_values_that_are_gathered_are_not_recorded() -> None:
    _, _, recordings = both(small_llama(), always_gather=True)
    assert recordings.reason == "layer 0 gathers its keys and values"


def test_recordings_that_were_used_least_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings_module, "MOST_KEPT", 2)
    model = small_model("llama")
    factory = new_factory(model)
    prompt = factory.make_cache()
    mx.eval(model(mx.array([PROMPT]), cache=prompt))

    def step(rows: int) -> int:
        """How many recordings a step of so many rows makes."""
        cache = [each.merge([each] * rows) if rows > 1 else each for each in prompt]
        before = recordings_of(factory).count
        mx.eval(model(mx.ones((rows, 1), mx.int32), cache=cache))
        return recordings_of(factory).count - before

    assert [step(rows) for rows in (1, 2, 2, 1, 3, 1, 2, 3)] == [1, 1, 0, 0, 1, 0, 1, 1]


def test_recordings_keep_neither_sequences_nor_arrays_and_end_with_their_factory() -> None:
    model = small_llama()
    factory = new_factory(model)
    cache = factory.make_cache()
    mx.eval(model(mx.array([PROMPT]), cache=cache))

    def held_after(steps: int) -> int:
        for _ in range(steps):
            mx.eval(model(mx.array([[5]]), cache=cache))
        gc.collect()
        return mx.get_active_memory()

    assert held_after(20) >= held_after(60)
    assert recordings_of(factory).count == 1
    pool = weakref.ref(factory.pool)
    cache.clear()
    gc.collect()
    assert factory.stats().blocks_used == 0
    del factory
    gc.collect()
    assert pool() is None
