"""The common prefix of prompts inserted together is computed once, and results do not change."""

from itertools import islice
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.prompt_segments import (
    cut_for_snapshots,
    joined,
    without_first,
)
from tests.support.generation import greedy, runs_of
from tests.support.zoo import small_model

COMMON = [(13 * i * i + 5 * i + 7) % 97 for i in range(700)]


def noted_tokens(model: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of a model gets, from now on."""
    computed, call = list[int](), type(model).__call__

    def counting(self: Any, inputs: mx.array, **named: Any) -> Any:
        computed.append(inputs.size)
        return call(self, inputs, **named)

    patch.setattr(type(model), "__call__", counting)
    return computed


def prompts_of(lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Prompts that share so many tokens with the others, and have so many of their own."""
    return [
        COMMON[:shared] + [90 + row + 3 * i % 7 for i in range(own)]
        for row, (shared, own) in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize(
    ("lengths", "computed_once", "before_partings"),
    [
        ([(600, 5), (600, 3), (600, 9)], 600, 0),
        ([(600, 1), (600, 0), (300, 7), (0, 20)], 600, 256),
    ],
)
@pytest.mark.slow
def test_what_prompts_share_is_computed_once(
    name: str,
    lengths: list[tuple[int, int]],
    computed_once: int,
    before_partings: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model with states, a prompt that parts from the others computes up to there first, to
    leave a state for the next one."""
    model: Any = small_model(name)
    prompts = prompts_of(lengths)
    expected = [greedy(model, p, PagedCacheFactory(model).make_cache(), 4).tokens for p in prompts]
    factory = PagedCacheFactory(model)
    # Observes what a step writes, and computes nothing.
    factory.can_admit(0)
    computed = noted_tokens(model, monkeypatch)
    with factory:
        generator = BatchGenerator(model, max_tokens=4)
        uids = generator.insert(prompts)
        if name == "qwen3_next":
            computed_once += before_partings
        assert sum(computed) <= computed_once
        runs = runs_of(generator, uids)
        generator.close()
    assert [run.tokens for run in runs] == expected
    factory.pool.check()


# Where any prompt leaves a state.
ON_THE_WAY = (2048, 4096, 8192, 16384)


@settings(deadline=None, derandomize=True)
@example(lengths=[512, 256], at_pages=True)
@given(lengths=st.lists(st.integers(1, 5000), max_size=4), at_pages=st.booleans())
def test_segments_are_cut_where_states_are_kept(lengths: list[int], at_pages: bool) -> None:
    """With `at_pages` also before the last token of each, so that a prompt may have another."""
    numbers = iter(range(sum(lengths)))
    segments = [list(islice(numbers, length)) for length in lengths]
    cut = cut_for_snapshots(segments, at_pages=at_pages)
    assert joined(cut) == joined(segments)
    assert all(cut)
    expected = {due for due in ON_THE_WAY if due < sum(lengths)}
    expected |= {segment[-1] + 1 for segment in segments}
    for segment in segments if at_pages else []:
        # Where the page of the segment's last token begins, unless the segment begins within it.
        page = segment[-1] // 256 * 256
        expected |= {page} if page > segment[0] else set()
    assert {part[-1] + 1 for part in cut} == expected


def test_what_is_known_is_taken_off_the_first_segments() -> None:
    segments = [[1, 2], [3], [4, 5, 6], [7]]
    for count in range(8):
        rest = without_first(segments, count)
        assert joined(rest) == joined(segments)[count:]
        assert all(rest)


def test_a_prompt_that_comes_later_waits_for_what_is_being_computed() -> None:
    model: Any = small_model("qwen3")
    prompts = prompts_of([(700, 400), (600, 5)])
    expected = [greedy(model, p, PagedCacheFactory(model).make_cache(), 4).tokens for p in prompts]
    with PagedCacheFactory(model):
        generator = BatchGenerator(model, max_tokens=4, prefill_step_size=128)
        with generator.stats() as stats:
            uids = generator.insert(prompts[:1])
            assert generator.next()[0]
            uids += generator.insert(prompts[1:])
            runs = runs_of(generator, uids)
        generator.close()
    assert [run.tokens for run in runs] == expected
    assert stats.prompt_tokens <= 1100 + 5
