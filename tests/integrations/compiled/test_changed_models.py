"""Recorded steps of models that change have the logits of steps that Python takes then."""

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers

from paged_kv import PagedCacheFactory
from paged_kv.integrations.compiled.recordings import (
    FREE_CHANGES,
    Comparisons,
    Recordings,
)
from paged_kv.steps import recorded
from tests.integrations.compiled.test_compiled_steps import small_llama
from tests.support.zoo import small_model

PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
OTHER_LOGITS = "a repeated step had other logits than one by Python"


# MLX compiles a dozen kernels with the compiler of C++.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _on_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of Python's between: what is wrong shows."""
    monkeypatch.setattr(Comparisons, "is_due", lambda self, is_first: False)


class Sides:
    """The same steps by recordings and by Python."""

    def __init__(self, model: Any) -> None:
        self.model = model
        factories = [
            PagedCacheFactory(model, compile=each, max_bytes=64 << 20) for each in (True, False)
        ]
        self._factories = factories
        self._caches = [each.make_cache() for each in factories]
        for cache in self._caches:
            mx.eval(model(PROMPT, cache=cache))

    @property
    def recordings(self) -> Recordings:
        return self._factories[0].recordings[self._factories[0].pool]

    def step(self, **options: Any) -> float:
        """The largest difference of two logits of the next step."""
        one, other = [self.model(mx.array([[7]]), cache=c, **options) for c in self._caches]
        return float(mx.abs(one - other).max())

    def prompt(self) -> None:
        """Another request begins."""
        mx.eval(self.model(PROMPT, cache=self._factories[0].make_cache()))

    def steps(self, count: int) -> float:
        return max(self.step() for _ in range(count))

    def change(self, change: Callable[[Any], None], changed: Any) -> None:
        """Change something, which must change what the model computes."""
        before = self.model(PROMPT)
        change(changed)
        assert float(mx.abs(self.model(PROMPT) - before).max()) > 1e-3


def add(weight: mx.array) -> None:
    weight += mx.random.normal(weight.shape)


def clear_some(weight: mx.array) -> None:
    weight[0:8] = 0


@pytest.mark.usefixtures("unchecked")
def test_weights_that_change_in_place_are_seen() -> None:
    sides = Sides(small_llama())
    weight = sides.model.model.layers[0].mlp.down_proj.weight  # as whoever holds it would
    assert sides.steps(3) < 1e-4
    for change in (add, clear_some):
        sides.change(change, weight)
        repeated = sides.recordings.repeated
        assert sides.steps(3) < 1e-4
        assert sides.recordings.repeated == repeated + 3
    assert sides.recordings.count == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("steps_before", [0, 3])
def test_without_mlx_compile_python_takes_all_steps(steps_before: int) -> None:
    sides = Sides(small_llama())
    for _ in range(steps_before):
        sides.step()
    repeated = sides.recordings.repeated
    mx.disable_compile()
    try:
        assert sides.steps(FREE_CHANGES + 2) < 1e-4
    finally:
        mx.enable_compile()
    assert sides.recordings.repeated == repeated
    assert sides.steps(3) < 1e-4
    assert sides.recordings.reason is None
    assert sides.recordings.repeated == repeated + 3


class Scaled(llama.Model):
    """A llama that looks at settings in each step."""

    factor = 1.0

    def __call__(self, inputs: Any, cache: Any = None, **options: Any) -> Any:  # type: ignore[override]
        logits: Any = super().__call__(inputs, cache, **options)
        setting: Any = self.args.rms_norm_eps
        return logits * self.factor * (2 if setting > 1 else 1)


def _of_a_dataclass(model: Any) -> None:
    model.args.rms_norm_eps = 2.0


def _of_a_class(model: Any) -> None:
    type(model).factor = 3.0


def _of_another_class(model: Any) -> None:
    model.__class__ = type("Other", (type(model),), {"factor": 3.0})


def _to_adapters(model: Any) -> None:
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    for _, module in model.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_b = mx.ones(module.lora_b.shape)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("change", [_of_a_dataclass, _of_another_class, _to_adapters])
def test_settings_that_change_are_noticed_at_the_next_prompt(change: Callable[[Any], None]) -> None:
    sides = Sides(small_llama(Scaled))
    assert sides.steps(3) < 1e-4
    sides.change(change, sides.model)
    sides.prompt()
    assert sides.steps(3) < 1e-4
    assert sides.recordings.reason is None


def test_a_change_that_nothing_notices_shows_in_a_comparison_or_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of those that repeat a recording, steps 1, 2, 4 and 8 are compared, and then the ninth."""
    sides = Sides(small_llama(Scaled))
    assert sides.steps(6) < 1e-4
    sides.change(_of_a_class, sides.model)
    with caplog.at_level(logging.WARNING, logger="paged_kv"):
        differences = [sides.step() for _ in range(8)]
    assert [at for at, each in enumerate(differences) if each > 1e-4] == [0, 1]
    assert sides.recordings.reason == OTHER_LOGITS
    assert sum("are not compiled" in each.getMessage() for each in caplog.records) == 1
    repeated = sides.recordings.repeated
    sides.recordings.reset()
    assert sides.steps(4) < 1e-4
    assert sides.recordings.repeated == repeated + 4


@pytest.mark.usefixtures("unchecked")
def test_settings_that_change_all_the_time_end_it() -> None:
    sides = Sides(small_llama(Scaled))
    for at in range(12):
        sides.model.args.rms_norm_eps = 1e-5 * (at + 1)
        sides.prompt()
        assert sides.step() < 1e-4
    assert sides.recordings.reason == "its settings change after few steps"


class Parent(llama.Model):
    def __call__(self, inputs: Any, cache: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return super().__call__(inputs, cache=cache)


class Child(Parent):
    def __call__(self, inputs: Any, cache: Any = None, more: float = 1.0) -> Any:  # type: ignore[override]
        return super().__call__(inputs, cache=cache) * (1 + more)


@pytest.mark.usefixtures("unchecked")
def test_a_step_of_a_parent_class_is_not_taken_for_the_childs() -> None:
    for kind in (Parent, Child):
        model = small_llama()
        model.__class__ = kind
        sides = Sides(model)
        sides.step()
    for _ in range(2):
        assert sides.step(more=2.0) < 1e-4
    assert sides.steps(2) < 1e-4
    assert sides.step(more=2.0) < 1e-4


class Long(llama.Model):
    """A llama that computes otherwise beyond a number of tokens."""

    def __call__(self, inputs: Any, cache: Any = None, **options: Any) -> Any:  # type: ignore[override]
        logits: Any = super().__call__(inputs, cache, **options)
        if cache is None or inputs.shape[1] > 1:
            return logits
        keys, _ = cache[0].keys_and_values()
        return logits * 2 if keys.shape[2] > 14 else logits


def test_a_number_that_is_compared_with_a_threshold_shows_at_once() -> None:
    sides = Sides(small_llama(Long))
    assert sides.steps(10) < 1e-4
    assert sides.recordings.repeated == sides.recordings.compared == 2
    assert sides.recordings.reason == OTHER_LOGITS


def test_compared_steps_advance_caches_and_states_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is compared: pages, positions and states stay those of Python's steps."""
    sides = Sides(small_model("qwen3_next", num_hidden_layers=2))
    with monkeypatch.context() as patch:
        patch.setattr(Comparisons, "is_due", lambda self, is_first: True)
        assert sides.steps(4) < 1e-4
    assert sides.recordings.compared >= 3
    assert sides.recordings.reason is None
    assert sides.steps(3) < 1e-4


@pytest.mark.usefixtures("unchecked")
def test_an_interrupted_step_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(small_llama())
    sides.steps(3)
    repeated = sides.recordings.repeated

    def interrupted(self: Any, changed: Any, written: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recorded.RecordableStep, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sides.step()
    assert sides.steps(2) < 1e-4
    assert sides.recordings.repeated == repeated + 3


@pytest.mark.usefixtures("unchecked")
def test_pages_in_more_slabs_than_a_kernel_takes_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides = Sides(small_llama())
    sides.steps(2)
    repeated = sides.recordings.repeated
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "MAX_SLABS", 0)
        assert sides.steps(2) < 1e-4
        assert sides.recordings.repeated == repeated
    assert sides.steps(2) < 1e-4
    assert sides.recordings.repeated == repeated + 2
