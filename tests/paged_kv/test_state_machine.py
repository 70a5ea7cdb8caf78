"""Random use of the whole package, in any order, beside the expected results.

    PAGED_KV_SOAK=2000 ./test tests/paged_kv/test_state_machine.py

tries so many random examples of each kind instead of the same few. A failure is printed step by
step.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from tests.support.state_machine.store_rules import StoreRules
from tests.support.state_machine.worlds import FORMATS, World

SOAK = int(os.environ.get("PAGED_KV_SOAK", "0"))
# From a pool that holds a prompt or two to one that is never full.
PAGES = st.sampled_from([60, 40, 100, 400])
BOOLEANS = st.booleans()
CHUNKS = st.sampled_from([None, 100, 1])
# Narrower than a page and wider, in rings of one page and of two.
WINDOWS = st.sampled_from([(None, 300, 32), (None, 20, 256), (32, 300), (1, None)])


def zoo(name: str, *windows: int) -> st.SearchStrategy[World]:
    """A model of mlx-lm with random weights, compared with mlx-lm's own caches."""
    each: list[tuple[int | None, ...]] = [(size,) for size in windows]
    sizes = st.sampled_from(each or [()])
    no, exact = st.just(False), st.just("fp16")
    return st.builds(World, st.just(name), sizes, no, exact, CHUNKS, PAGES, st.booleans())


def table(
    windows: st.SearchStrategy[tuple[int | None, ...]],
    has_states: st.SearchStrategy[bool] = BOOLEANS,
) -> st.SearchStrategy[World]:
    """A model for which the expected content of every page is known, in every format."""
    formats = st.sampled_from(FORMATS)
    return st.builds(
        World, st.just("table"), windows, has_states, formats, CHUNKS, PAGES, st.booleans()
    )


WORLDS = {
    "llama": zoo("llama", 32, 300),
    "gemma3": zoo("gemma3_text", 32, 300),
    "lfm2": zoo("lfm2"),
    "falcon_h1": zoo("falcon_h1"),
    "table": table(st.just((None, None))),
    # Layers with windows would shorten what is found of most prompts.
    "hybrid": table(st.just((None,)), st.just(True)),
    "windows": table(WINDOWS),
}


def run(worlds: st.SearchStrategy[World], examples: int) -> None:
    class Machine(StoreRules):
        @initialize(world=worlds)
        def begin_in(self, world: World) -> None:
            self.start(world)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            derandomize=not SOAK,
            database=None,
            deadline=None,
            max_examples=SOAK or examples,
            # Shrinking an example takes minutes.
            phases=(Phase.generate,),
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )


# gemma3 has everything that a llama has, lfm2 everything that falcon_h1 has, and windows everything
# that a table and a hybrid have.
@pytest.mark.parametrize(
    "name",
    WORLDS
    if SOAK
    else ["windows", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "lfm2"))],
)
@pytest.mark.timeout(0 if SOAK else 300)
def test_nothing_goes_wrong(name: str) -> None:
    run(WORLDS[name], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table", "hybrid"])
@pytest.mark.timeout(0 if SOAK else 300)
def test_nothing_goes_wrong_with_quantised_prompts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    run(WORLDS[name], 5)


@pytest.mark.soak
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.timeout(0 if SOAK else 1800)
def test_nothing_goes_wrong_on_each_backend(name: str, backend: str) -> None:
    run(WORLDS[name], 8)
