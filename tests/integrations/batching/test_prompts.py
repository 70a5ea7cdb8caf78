"""Prompts of a batch take turns, and texts are what they are without."""

from typing import Any

import pytest

from paged_kv import PagedCacheFactory
from paged_kv.admission.scheduler import PART_STEPS
from paged_kv.integrations.batching import prompts
from paged_kv.integrations.batching.preemption import attach
from paged_kv.integrations.batching.rows import WaitingQueue, step_with
from paged_kv.integrations.batching.short_memory import Responses
from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from tests.integrations.batching.test_preemption import (
    LARGE,
    PROMPTS,
    TOLERANCE,
    Noted,
    factory_of_blocks,
    generator_of,
    longer,
    undisturbed,
)
from tests.support.generation import assert_nothing_is_used, assert_same_runs
from tests.support.grids import plain_cases
from tests.support.zoo import small_model


class Clock:
    """Counts a second for the step of answers, and one for 16 tokens of prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(prompts, "perf_counter", lambda: self.now)
        monkeypatch.setattr(prompts, "step_with", self._step)

    def _step(self, generator: Any, begun: set[int]) -> Responses:
        parts = GeneratorParts(generator)
        before = parts.prompt_tokens
        prompts, generated = step_with(generator, begun)
        self.now += bool(generated) + (parts.prompt_tokens - before) / 16
        return prompts, generated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks"),
    plain_cases([("qwen3", 5)], [("qwen3", 5), ("gemma3_text", 100), ("qwen3_next", 5)]),
)
def test_texts_are_those_without_turns(
    name: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where sequences are preempted. Each arrives a step after the one before."""
    model, expected = small_model(name), undisturbed(longer, name)
    Clock(monkeypatch)
    factory = factory_of_blocks(model, blocks)
    with factory:
        factory.decode_share = 0.5
        generator: Any = generator_of(model)
        noted = Noted(generator, [])
        for prompt in PROMPTS:
            (uid,) = generator.insert([prompt], max_tokens=[150])
            noted.given[uid] = []
            noted.step()
        while len(noted.ended) < len(PROMPTS):
            noted.step()
    assert_same_runs(noted.runs(), expected, TOLERANCE)
    assert (factory.stats().preemptions > 0) == (blocks == 5)
    assert_nothing_is_used(factory)


def test_a_long_prompt_leaves_answers_their_time_and_waits_with_its_pages_for_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, model = Clock(monkeypatch), small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=LARGE)
    with factory:
        factory.decode_share = 0.5
        generator: Any = generator_of(model, prefill_batch_size=1, prefill_step_size=2048)
        preemption = attach(generator, factory)

        def insert(prompt: list[int]) -> int:
            (uid,) = generator.insert_segments([[prompt]], [400], caches=[factory.make_cache()])
            preemption.begin_later(uid)
            noted.given[uid] = []
            return int(uid)

        noted = Noted(generator, [])
        answer = insert([1, 2, 3])
        while len(noted.given[answer]) < PART_STEPS:
            noted.step()
        long, began, had = insert(PROMPTS[0] * 3), clock.now, len(noted.given[answer])
        while not generator._prompt_batch.uids:
            noted.step()
        (short,), steps, pages = [insert(PROMPTS[1][:50])], 0, factory.stats().blocks_used
        while not noted.given[short]:
            noted.step()
            steps += 1
            # The one place for prompts is the short one's.
            waiting = [each for each in WaitingQueue(generator, int) if each.uid == long]
            assert all(len(each.tokens) == 256 for each in waiting)
        assert steps <= 4
        assert factory.stats().blocks_used >= pages
        while not noted.given[long]:
            noted.step()
        assert len(noted.given[answer]) - had >= 0.45 * (clock.now - began)
    stats = factory.stats()
    assert (stats.preemptions, stats.tokens_recomputed) == (0, 0)
