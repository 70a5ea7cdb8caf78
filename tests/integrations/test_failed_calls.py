"""A model's call in which anything fails has no effect, and can be repeated.

The n-th of the calls that map, copy, write, evaluate and attend raises an error, or one of the
model's layers does, as when its user presses Ctrl-C. Then the call is repeated. It and later calls
must give what they give where nothing failed: pages, states of recurrent layers and rows alike.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from tests.support.failures import ERRORS, Failures
from tests.support.grids import plain_cases
from tests.support.zoo import small_model

TOLERANCE = 2e-5
# Of a case's calls, so many fail, one in each repetition: a batch of rows makes 400.
MOST = 20
PROMPT = [(7 * at) % 50 + 1 for at in range(300)]


@dataclass(frozen=True)
class Case:
    """A call that fails.

    Attributes:
        model: the model's file.
        tokens: those of the call.
        rows: sequences of the batch.
        options: of the factory.
    """

    model: str
    tokens: int = 1
    rows: int = 1
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "decode": Case("llama"),
    "batch": Case("llama", rows=2),
    "draft over recoded pages": Case("llama", 4, options={"page_format": "q8"}),
    "rings": Case("gemma3_text", rows=2),
    "long step over rings": Case("gemma3_text", 290),
    "hybrid": Case("qwen3_next", rows=2),
    "draft of a hybrid": Case("qwen3_next", 4),
    "hybrid with convolutions": Case("falcon_h1"),
    "without pages": Case("mamba2", rows=2),
    "rows": Case("deepseek_v41"),
    "batch of rows": Case("deepseek_v41", rows=2),
    "draft over rows": Case("deepseek_v41", 4),
    "compiled": Case("llama", options={"compile": True}),
    "compiled hybrid": Case("qwen3_next", options={"compile": True}),
}


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
        first = [[(11 * at + row) % 50 + 1 for at in range(count)] for row in range(self.rows)]
        later = [[[token + row] for row in range(self.rows)] for token in (3, 9)]
        return [self.call(tokens) for tokens in (first, *later)]


@contextlib.contextmanager
def failing_layers(model: Any, failures: Failures, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the model's layers be calls that may fail, too."""
    with patch.context() as patched:
        for kind in {type(layer) for layer in model.layers}:
            patched.setattr(kind, "__call__", failures.wrap("layer", kind.__call__))
        yield


@pytest.mark.parametrize(
    ("name", "late"),
    plain_cases(
        [("decode", False), ("hybrid", True), ("rows", False)],
        list(itertools.product(CASES, (False, True))),
    ),
)
def test_a_call_can_be_repeated_whatever_failed_in_it(
    name: str,
    late: bool,
    failures: Failures,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    model = small_model(case.model)
    expected = World(case, model).go_on(case.tokens)
    world = World(case, model)
    failures.is_late = late
    first = [[(11 * at + row) % 50 + 1 for at in range(case.tokens)] for row in range(case.rows)]
    with failing_layers(model, failures, monkeypatch):
        before = copy.deepcopy(world.cache)
        failures.left = 1 << 20
        world.model(mx.array(first), cache=world.cache)
        failures.left, count, world.cache = -1, len(failures.calls), before
        for n in range(0, count, -(-count // MOST)):
            before = copy.deepcopy(world.cache)
            failures.error, failures.calls, failures.left = ERRORS[n % len(ERRORS)], [], n
            with contextlib.suppress(failures.error):
                world.model(mx.array(first), cache=world.cache)
            failures.left = -1
            if len(failures.calls) <= n:
                break
            found = world.go_on(case.tokens)
            for a, b in zip(found, expected, strict=True):
                assert mx.allclose(a, b, atol=TOLERANCE), f"{failures.error} at {failures.calls}"
            world.factory.pool.check()
            world.cache = before
    assert n, "too few calls failed to show anything"


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_call_that_begins_no_step_undoes_none(name: str) -> None:
    model, nothing = small_model(name), Any
    expected = World(Case(name), model).go_on(1)
    world = World(Case(name), model)
    with pytest.raises((AttributeError, TypeError)):
        world.model(nothing, cache=world.cache)
    for a, b in zip(world.go_on(1), expected, strict=True):
        assert mx.allclose(a, b, atol=TOLERANCE)
