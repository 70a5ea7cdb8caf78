"""A model's call in which anything fails has no effect, and can be repeated.

The n-th of the calls that map, copy, write, evaluate and attend raises an error, or one of the
model's layers does, as when its user presses Ctrl-C. Then the call is repeated. It and later calls
must give what they give where nothing failed: pages, states of recurrent layers and rows alike.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from tests.support.failures import ERRORS, Failures
from tests.support.zoo import small_model

TOLERANCE = 2e-5
# Of a case's calls, so many fail, one in each repetition: a batch of rows makes 400.
MOST = 12
PROMPT = [(7 * at) % 50 + 1 for at in range(300)]


class Case(NamedTuple):
    """A call of so many tokens in each of so many rows that fails."""

    model: str
    tokens: int = 1
    rows: int = 1
    options: Mapping[str, Any] = MappingProxyType({})


# Few layers, but one of each kind.
LAYERS = {"qwen3": 2, "gemma3_text": 3, "qwen3_next": 2, "mamba2": 2}
CASES = {
    "decode": Case("qwen3"),
    "draft over recoded pages": Case("qwen3", 4, options={"page_format": "q8"}),
    "rings": Case("gemma3_text", rows=2),
    "long step over rings": Case("gemma3_text", 290),
    "hybrid": Case("qwen3_next", rows=2),
    "draft of a hybrid": Case("qwen3_next", 4),
    "without pages": Case("mamba2", rows=2),
    "one row after the other": Case("gpt_bigcode", rows=2),
    "rows": Case("deepseek_v41"),
    "batch of rows": Case("deepseek_v41", rows=2),
    "draft over rows": Case("deepseek_v41", 4),
    "compiled": Case("qwen3", options={"compile": True}),
    "compiled hybrid": Case("qwen3_next", options={"compile": True}),
}


PLAIN, LONG = {"decode", "hybrid"}, {"batch of rows", "draft over rows"}


def model_of(case: Case) -> Any:
    layers = LAYERS.get(case.model)
    return small_model(case.model, **({"num_hidden_layers": layers} if layers else {}))


class World:
    """A model that has read a prompt, and whose next call is to fail."""

    def __init__(self, case: Case, model: Any) -> None:
        self.model = model
        self.factory = PagedCacheFactory(model, max_bytes=256 << 20, **case.options)
        self.cache = self.factory.make_cache()
        self.rows = case.rows
        self.call([PROMPT[at : 290 + at] for at in range(case.rows)])
        for token in (5, 6, 7, 8):
            self.call([[token + at] for at in range(case.rows)])

    def call(self, tokens: list[list[int]]) -> mx.array:
        logits: mx.array = self.model(mx.array(tokens), cache=self.cache)
        mx.eval(logits, [each.state for each in self.cache])
        return logits

    def go_on(self, count: int) -> list[mx.array]:
        """The logits of the call, and of some after it."""
        later = [[[token + row] for row in range(self.rows)] for token in (3, 9)]
        return [self.call(tokens) for tokens in (first_tokens(count, self.rows), *later)]


def first_tokens(count: int, rows: int) -> list[list[int]]:
    return [[(11 * at + row) % 50 + 1 for at in range(count)] for row in range(rows)]


def assert_same(found: list[mx.array], expected: list[mx.array], failure: str) -> None:
    for a, b in zip(found, expected, strict=True):
        assert mx.allclose(a, b, atol=TOLERANCE), failure


@contextlib.contextmanager
def failing_layers(model: Any, failures: Failures, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the model's layers be calls that may fail, too."""
    with patch.context() as patched:
        for kind in {type(layer) for layer in model.layers}:
            patched.setattr(kind, "__call__", failures.wrap("layer", kind.__call__))
        yield


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in PLAIN else pytest.mark.soak if name in LONG else pytest.mark.slow,
        )
        for name in CASES
    ],
)
def test_a_call_can_be_repeated_whatever_failed_in_it(
    name: str, late: bool, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model = model_of(case)
    expected = World(case, model).go_on(case.tokens)
    world = World(case, model)
    failures.is_late = late
    first = mx.array(first_tokens(case.tokens, case.rows))
    with failing_layers(model, failures, monkeypatch):
        before = copy.deepcopy(world.cache)
        failures.left = 1 << 20
        world.model(first, cache=world.cache)
        failures.left, count, world.cache = -1, len(failures.calls), before
        for n in range(0, count, -(-count // MOST)):
            before = copy.deepcopy(world.cache)
            failures.error, failures.calls, failures.left = ERRORS[n % len(ERRORS)], [], n
            with contextlib.suppress(failures.error):
                world.model(first, cache=world.cache)
            failures.left = -1
            if len(failures.calls) <= n:
                break
            assert_same(world.go_on(case.tokens), expected, f"{failures.error} at {failures.calls}")
            world.factory.pool.check()
            world.cache = before
    assert n, "too few calls failed to show anything"


@pytest.mark.slow
def test_a_call_that_begins_no_step_undoes_none() -> None:
    case = Case("qwen3_next")
    model, nothing = model_of(case), Any
    expected = World(case, model).go_on(1)
    world = World(case, model)
    with pytest.raises((AttributeError, TypeError)):
        world.model(nothing, cache=world.cache)
    assert_same(world.go_on(1), expected, "it began no step")


def test_a_new_cache_takes_another_batch_after_a_first_call_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a smaller one, where there was no memory for the first."""
    model = model_of(Case("qwen3"))
    factory = PagedCacheFactory(model, max_bytes="64MB")
    expected = model(mx.array(first_tokens(5, 2)), cache=factory.make_cache())
    cache = factory.make_cache()
    with monkeypatch.context() as patched:
        patched.delattr(model.layers[-1], "mlp")
        with pytest.raises(AttributeError):
            model(mx.array(first_tokens(5, 4)), cache=cache)
    assert_same([model(mx.array(first_tokens(5, 2)), cache=cache)], [expected], "another size")
