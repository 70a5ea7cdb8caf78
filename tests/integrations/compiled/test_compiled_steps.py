"""Decode steps that are recorded once and repeated without Python give the same tokens."""

import copy
import gc
import logging
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from benches.host_cost import HEAD_DIM, KV_HEADS, GraphMaker, backend, filled, small_llama
from benches.model_families import alone, attempt, batched
from paged_kv import PagedCacheFactory, PoolExhausted
from paged_kv.integrations.compiled import recordings as recordings_module
from paged_kv.integrations.compiled.recordings import Comparisons, Recordings, compiles
from paged_kv.kernels import faster_steps
from paged_kv.kernels.backends import variant
from paged_kv.kernels.faster_steps import note_faster
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.left_out import COMPILED_STEPS, leave_out
from paged_kv.kernels.pages.warn_once import warn_once
from paged_kv.kernels.plain.plain_backend import PlainBackend
from tests.support.grids import plain_only
from tests.support.zoo import FAMILIES, small_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
POOL_BYTES = 64 << 20
# Why models of `FAMILIES` take no recording.
REASONS = {
    "minimax_m3_vl": "it lets keys or values in its cache wait for other arrays",
}


@pytest.fixture(autouse=True)
def _only_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain operations, and without steps of Python between: what is wrong shows."""
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    monkeypatch.setattr(Comparisons, "is_due", lambda self, is_first: False)


def new_factory(model: Any, *, compile: bool = True, **options: Any) -> PagedCacheFactory:
    return PagedCacheFactory(model, compile=compile, **{"max_bytes": POOL_BYTES} | options)


def recordings_of(factory: PagedCacheFactory) -> Recordings:
    return factory.recordings[factory.pool]


def greedy(model: Any, prompt: list[int], cache: list[Any], count: int) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache)
    return [int(token) for token, _ in steps]


def both(
    model: Any, run: Callable[[PagedCacheFactory], Any], **options: Any
) -> tuple[Any, Any, Recordings]:
    """What a run gives without recordings, and with them."""
    factory = new_factory(model, **options)
    return run(new_factory(model, compile=False, **options)), run(factory), recordings_of(factory)


@pytest.mark.parametrize("name", plain_only(["llama", "gemma3_text", "qwen3_next"], FAMILIES))
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
        *((name, "fp16") for name in ("llama", "gemma3_text", "qwen3_next", "deepseek_v3")),
        *((name, "q8") for name in ("llama", "gemma3_text", "qwen3_next")),
    ],
)
def test_pages_that_fill_and_windows_that_wrap(name: str, page_format: str) -> None:
    """The steps between, which copy, recode or map pages, are as without recordings."""
    model = small_model(name)
    prompt = [(5 * i + i * i) % 97 for i in range(250)]
    expected, got, recordings = both(
        model,
        lambda factory: greedy(model, prompt, factory.make_cache(), 24),
        page_format=page_format,
    )
    assert got == expected
    assert recordings.repeated >= 20


@pytest.mark.slow
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
            mx.eval(model(mx.array([PROMPT]), cache=row))
            mx.eval(model(mx.array([[7]]), cache=row))
        cache = [one.merge([one, other]) for one, other in zip(*rows, strict=True)]
        for each in cache:
            each.prepare(lengths=[4, 1], right_padding=[0, 3])
        tokens = mx.array([[5, 6, 7, 8], [9, 0, 0, 0]])
        for at in range(4):
            mx.eval(model(tokens[:, at : at + 1], cache=cache))
        for each in cache:
            each.finalize()
        logits = [model(mx.array([[3], [token]]), cache=cache) for token in range(3)]
        return mx.argmax(mx.stack(logits), axis=-1).tolist()

    expected, got, recordings = both(model, run)
    assert got == expected
    assert recordings.repeated == 2 + 3


def test_forks_go_on_by_themselves() -> None:
    model = small_model("gemma3_text")

    def run(factory: PagedCacheFactory) -> Any:
        cache = factory.make_cache()
        first = greedy(model, PROMPT, cache, 5)
        forks = [copy.deepcopy(cache) for _ in range(2)]
        later = [greedy(model, [token], fork, 6) for token, fork in enumerate(forks)]
        return first, later, greedy(model, [7], cache, 6)

    expected, got, recordings = both(model, run)
    assert got == expected
    assert recordings.repeated >= 15


def test_tokens_that_were_trimmed_are_written_again() -> None:
    model = small_model("llama")

    def run(factory: PagedCacheFactory) -> Any:
        cache = factory.make_cache()
        first = greedy(model, PROMPT, cache, 5)
        for each in cache:
            each.trim(3)
        return first, greedy(model, [5], cache, 5)

    expected, got, _ = both(model, run)
    assert got == expected


def test_drafts_between_recorded_steps() -> None:
    model, draft = small_model("llama"), small_model("llama", seed=1)

    def run(factory: PagedCacheFactory) -> Any:
        drafting = new_factory(draft, compile=factory.recordings is not None)
        caches = factory.make_cache() + drafting.make_cache()
        steps = speculative_generate_step(
            mx.array(PROMPT), model, draft, max_tokens=12, prompt_cache=caches
        )
        return [int(token) for token, *_ in steps]

    expected, got, _ = both(model, run)
    assert got == expected


def test_threads_have_recordings_of_their_own() -> None:
    model = small_model("llama")
    expected = greedy(model, PROMPT, new_factory(model, compile=False).make_cache(), 12)
    factory = new_factory(model)
    got: list[list[int]] = []

    def work(stream: mx.Stream | None = None) -> None:
        with mx.stream(stream or mx.new_stream(mx.default_device())):
            got.append(greedy(model, PROMPT, factory.make_cache(), 12))

    mine = mx.new_stream(mx.default_device())
    work(mine)
    alone = recordings_of(factory).count
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work(mine)
    assert got == [expected] * 4
    assert recordings_of(factory).count == 3 * alone > 0


def test_weights_that_are_replaced_are_seen_and_adapters_are_recorded_anew() -> None:
    model = small_model("llama")
    factory = new_factory(model)
    before = greedy(model, PROMPT, factory.make_cache(), 8)
    assert recordings_of(factory).count == 1
    for change, recorded in ((_replace_a_weight, 0), (_add_adapters, 1)):
        change(model)
        changed = greedy(model, PROMPT, new_factory(model, compile=False).make_cache(), 8)
        assert changed != before
        count = recordings_of(factory).count
        assert greedy(model, PROMPT, factory.make_cache(), 8) == changed
        assert recordings_of(factory).count == count + recorded
        before = changed


def _replace_a_weight(model: Any) -> None:
    projection = model.model.layers[0].self_attn.o_proj
    projection.weight = projection.weight[::-1]


def _add_adapters(model: Any) -> None:
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    for _, module in model.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_b = mx.ones(module.lora_b.shape)


class AsksForNumbers(llama.Model):
    """A llama that makes a constant of the number of tokens in its cache, as some models do."""

    asks: Any

    def __call__(self, inputs: mx.array, cache: Any = None, **options: Any) -> Any:  # type: ignore[override]
        logits: Any = super().__call__(inputs, cache, **options)
        return logits if cache is None else logits + type(self).asks(cache[0], logits)


def _of_the_keys(cache: Any, logits: mx.array) -> Any:
    keys, _ = cache.keys_and_values()
    return mx.zeros_like(logits) + keys.shape[2] / 100


_calls: list[int] = []


def _of_its_own(cache: Any, logits: mx.array) -> mx.array:
    _calls.append(1)
    return mx.full(logits.shape, len(_calls), logits.dtype)


@pytest.mark.parametrize(
    ("asks", "reason"),
    [
        (_of_the_keys, "operations depend on how many tokens there are"),
        (_of_its_own, "operations depend on how many tokens there are"),
        (lambda cache, logits: logits * cache.size(), "asks its cache for `size`"),
        (lambda cache, logits: logits * mx.array(cache.offset).max().item(), "eval"),
        (lambda cache, logits: logits * cache.keys_and_values()[0].sum(), "keys, values or a mask"),
    ],
)
def test_a_model_that_asks_for_numbers_is_not_compiled(
    asks: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_llama_that(asks)
    factory = new_factory(model)
    cache = factory.make_cache()
    with caplog.at_level(logging.INFO, logger="paged_kv"):
        for token in (PROMPT, [1], [2], [3]):
            mx.eval(model(mx.array([token]), cache=cache))
    recordings = recordings_of(factory)
    assert recordings.reason is not None
    assert reason in recordings.reason
    assert (recordings.count, recordings.repeated) == (0, 0)
    messages = [each.getMessage() for each in caplog.records]
    assert sum("are not compiled" in each for each in messages) == 1


def small_llama_that(asks: Any) -> Any:
    model: Any = small_model("llama")
    model.__class__ = type("Asking", (AsksForNumbers,), {"asks": staticmethod(asks)})
    return model


@pytest.mark.parametrize("is_right", [True, False])
def test_what_mlx_cannot_export_is_computed_and_compared(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(cache: Any, logits: mx.array) -> Any:
        keys, _ = cache.keys_and_values()
        fused = mx.compile(lambda each: mx.exp(each) + 1)(mx.zeros(logits.shape))
        return fused if is_right else fused * keys.shape[2]

    model = small_llama_that(asks)
    expected, got, recordings = both(
        model, lambda factory: greedy(model, PROMPT, factory.make_cache(), 6)
    )
    assert got == expected
    reason = "its operations depend on how many tokens there are"
    assert recordings.reason == (None if is_right else reason)
    assert (recordings.repeated >= 4) == is_right


class Counts(llama.Model):
    """A llama that counts its steps in an array of its own."""

    def __call__(self, inputs: mx.array, cache: Any = None, **options: Any) -> Any:  # type: ignore[override]
        self.steps = getattr(self, "steps", mx.zeros(())) + 1
        return super().__call__(inputs, cache, **options) * self.steps


def test_a_model_that_counts_its_steps_goes_on_counting() -> None:
    model: Any = small_model("llama")
    model.__class__ = Counts
    factory = new_factory(model)
    cache = factory.make_cache()
    model.steps = mx.zeros(())
    for token in (PROMPT, [1], [2], [3]):
        mx.eval(model(mx.array([token]), cache=cache))
    assert model.steps.item() == 4
    reason = recordings_of(factory).reason
    assert reason == "it replaces its own arrays or settings in each step"


def test_a_model_may_ask_for_positions_after_its_write() -> None:
    def of_the_positions(cache: Any, logits: mx.array) -> Any:
        positions = mx.array(cache.offset).reshape(-1, 1, 1)
        return 9 * mx.sin(positions * mx.arange(logits.shape[-1]))

    model = small_llama_that(of_the_positions)
    expected, got, recordings = both(
        model, lambda factory: greedy(model, PROMPT, factory.make_cache(), 6)
    )
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
    model = small_model("llama")
    factory = new_factory(model, always_gather=True)
    greedy(model, PROMPT, factory.make_cache(), 4)
    assert recordings_of(factory).reason == "layer 0 gathers its keys and values"


def test_a_full_pool_refuses_a_recorded_step_like_any_other() -> None:
    model = small_model("qwen3")
    factory = new_factory(model, max_bytes=1 << 20)
    prompt = mx.array([[i % 97 for i in range(255)]])
    caches: list[Any] = []
    while not caches or factory.can_admit(255):
        caches.append(factory.make_cache())
        mx.eval(model(prompt, cache=caches[-1]))
    cache = caches[0]
    mx.eval(model(mx.array([[1]]), cache=cache))
    repeated = recordings_of(factory).repeated
    with pytest.raises(PoolExhausted):
        model(mx.array([[2]]), cache=cache)
    assert {each.offset for each in cache} == {256}
    caches.pop()
    logits = model(mx.array([[2]]), cache=cache)
    assert recordings_of(factory).repeated == repeated + 1
    stock = make_prompt_cache(model)
    model(prompt, cache=stock)
    model(mx.array([[1]]), cache=stock)
    assert mx.allclose(logits, model(mx.array([[2]]), cache=stock), atol=1e-4)


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


def test_a_recording_keeps_no_sequence() -> None:
    model = small_model("llama")
    factory = new_factory(model)
    greedy(model, PROMPT, factory.make_cache(), 4)
    gc.collect()
    assert recordings_of(factory).count
    assert factory.stats().blocks_used == 0


def test_recordings_end_with_their_factory() -> None:
    model = small_model("llama")
    factory = new_factory(model)
    greedy(model, PROMPT, factory.make_cache(), 4)
    assert recordings_of(factory).count
    pool = weakref.ref(factory.pool)
    del factory
    gc.collect()
    assert pool() is None


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    model = small_model("qwen3")
    factory = new_factory(model)
    cache = factory.make_cache()
    mx.eval(model(mx.array([PROMPT]), cache=cache))

    def held_after(steps: int) -> int:
        for _ in range(steps):
            mx.eval(model(mx.array([[5]]), cache=cache))
        gc.collect()
        return mx.get_active_memory()

    first = held_after(60)
    assert held_after(180) <= first
    assert recordings_of(factory).count == 1


@pytest.mark.parametrize("batch", [1, 8])
def test_long_runs_record_a_handful(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000 tokens, on kernels that only make arrays."""
    monkeypatch.delenv("PAGED_KV_BACKEND")
    model, maker = small_llama(layers=2), GraphMaker()
    with backend("metal", maker):
        factory = PagedCacheFactory(model, compile=True, max_bytes=1 << 30)
        caches = filled(factory.make_cache(), batch, 300)
        for length in range(1024, 10_240, 512):
            count = length - max(int(each) for each in mx.array(caches[0].offset).reshape(-1))
            tokens = mx.zeros((batch, KV_HEADS, count, HEAD_DIM), mx.float16)
            for cache in caches:
                cache.update_and_fetch(tokens, tokens)
                mx.eval(cache.state)
            for _ in range(3):
                model(mx.ones((batch, 1), mx.int32), cache=caches)
    recordings = recordings_of(factory)
    assert recordings.reason is None
    assert recordings.count <= 12
    assert recordings.repeated >= 3 * 17


def test_where_steps_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PAGED_KV_COMPILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu, plain = GpuBackend("metal", GraphMaker()), PlainBackend()
    with caplog.at_level(logging.WARNING, logger="paged_kv"):
        warn_once.cache_clear()
        assert [compiles(None, gpu) for _ in range(3)] == [False] * 3
    (message,) = [each.getMessage() for each in caplog.records]
    assert "`paged-kv doctor`" in message
    note_faster(variant(gpu), is_so=True)
    assert compiles(None, gpu)
    for part in ("version", "device_name"):
        with monkeypatch.context() as here:
            here.setattr(faster_steps, part, lambda *_: "another")
            assert not compiles(None, gpu)
    note_faster(variant(plain), is_so=True)
    assert not compiles(None, plain)
    assert compiles(True, plain)
    leave_out(variant(gpu), {COMPILED_STEPS: "slower"})
    assert not compiles(None, gpu)
    assert compiles(True, gpu)
    leave_out(variant(gpu), {})
    monkeypatch.setenv("PAGED_KV_COMPILE", "0")
    assert not compiles(None, gpu)
    monkeypatch.setenv("PAGED_KV_COMPILE", "1")
    assert compiles(None, plain)
    assert not compiles(False, plain)
    monkeypatch.setenv("PAGED_KV_COMPILE", "yes")
    with pytest.raises(ValueError, match=re.escape("PAGED_KV_COMPILE must be 0 or 1, got 'yes'")):
        PagedCacheFactory(small_model("llama"))
    with pytest.raises(TypeError, match="compile must be True, False or None, got"):
        PagedCacheFactory(small_model("llama"), compile="no")  # type: ignore[arg-type]


def test_a_backend_that_mlx_cannot_record_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "native")
    model = small_model("llama")
    factory = new_factory(model)
    greedy(model, PROMPT, factory.make_cache(), 3)
    assert recordings_of(factory).reason == "MLX cannot record the native backend"
