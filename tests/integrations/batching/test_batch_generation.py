"""mlx-lm's BatchGenerator gives every sequence of a paged batch the same tokens as alone."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory
from tests.support.generation import (
    Run,
    assert_nothing_is_used,
    assert_same_runs,
    greedy,
)
from tests.support.zoo import FAMILIES, small_model

# A batch multiplies a sequence as part of a larger matrix: float32 sums in another order.
TOLERANCE = 2e-3
# mlx-lm's own attention in gemma2 does not accept a batch's mask.
STOCK_CANNOT_BATCH = {"gemma2"}
# Their own batches differ from their single runs: plamo3 attends with a window one token longer in
# longer steps, and minimax_m3_vl chooses blocks of keys that padding shifts.
BATCH_DIFFERS = {"plamo3", "minimax_m3_vl"}
CAN_BATCH = [name for name in FAMILIES if name not in STOCK_CANNOT_BATCH]
# With recurrent layers; with a window, and with latent attention; the soak takes the others.
MARKS: dict[str, Any] = {
    "qwen3_next": (),
    "gemma3_text": pytest.mark.slow,
    "deepseek_v3": pytest.mark.slow,
}
LENGTHS = (3, 70, 1, 260, 17)
PROMPTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
NEW_TOKENS = 6

MakeCache = Callable[[], list[Any]]


class Served:
    """A batch generator with caches of one kind, and the responses that it gave to each
    sequence."""

    def __init__(self, model: Any, make_cache: MakeCache, **options: Any) -> None:
        self.generator = BatchGenerator(
            model, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=48, **options
        )
        self.make_cache = make_cache
        self.responses: dict[int, list[Any]] = {}

    def insert(self, segments: Sequence[list[list[int]]], **options: Any) -> list[int]:
        options.setdefault("caches", [self.make_cache() for _ in segments])
        options.setdefault("max_tokens", [NEW_TOKENS] * len(segments))
        uids: list[int] = self.generator.insert_segments(list(segments), **options)
        self.responses.update({uid: [] for uid in uids})
        return uids

    def steps(self, count: int) -> None:
        for _ in range(count):
            for response in self.generator.next_generated():
                self.responses[response.uid].append(response)

    def finish(self) -> list[Run]:
        while responses := self.generator.next_generated():
            for response in responses:
                self.responses[response.uid].append(response)
        return [self.run(uid) for uid in self.responses if self.responses[uid]]

    def run(self, uid: int) -> Run:
        given = self.responses[uid]
        return Run([each.token for each in given], mx.stack([each.logprobs for each in given]))


def staggered(model: Any, make_cache: MakeCache, prompts: list[list[int]]) -> list[Run]:
    """More requests than the batch size, one in segments, some later than others, one removed."""
    served = Served(model, make_cache)
    third = len(prompts[3]) // 3
    uids = served.insert([[prompts[0]], [prompts[1]], [prompts[1]], [prompts[2]]])
    served.steps(2)
    served.generator.remove([uids[1]])
    served.responses[uids[1]].clear()
    served.insert([[prompts[3][:third], prompts[3][third:]], [prompts[4]]])
    return served.finish()


def expected_runs(model: Any, prompts: list[list[int]]) -> list[Run]:
    return [greedy(model, p, make_prompt_cache(model), NEW_TOKENS, 48) for p in prompts]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.soak)) for name in CAN_BATCH],
)
def test_batched_equals_single_equals_stock(name: str) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    ours = staggered(model, factory.make_cache, PROMPTS)
    assert_same_runs(ours, staggered(model, lambda: make_prompt_cache(model), PROMPTS), TOLERANCE)
    if name not in BATCH_DIFFERS:
        assert_same_runs(ours, expected_runs(model, PROMPTS), TOLERANCE)
    assert_nothing_is_used(factory)


@pytest.fixture(scope="module", params=["qwen3_next", "gemma3_text"])
def model(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


def conversation(model: Any, make_cache: MakeCache) -> tuple[list[Run], list[list[Any]]]:
    """Caches that a batch returned go into a second batch, and again into a third."""
    first = Served(model, make_cache)
    uids = first.insert([[PROMPTS[0]], [PROMPTS[3]]])
    first.finish()
    returned = [first.responses[uid][-1].prompt_cache for uid in uids]
    runs = []
    for _ in range(2):
        again = Served(model, make_cache)
        again.insert([[PROMPTS[4]], [PROMPTS[0]], [PROMPTS[4]]], caches=[*returned, make_cache()])
        runs += again.finish()
    return runs, returned


@pytest.mark.slow
def test_caches_go_in_and_out_of_batches_and_stay_the_callers(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    ours, caches = conversation(model, factory.make_cache)
    stock, stock_caches = conversation(model, lambda: make_prompt_cache(model))
    assert_same_runs(ours, stock, TOLERANCE)
    assert_same_runs(ours[:3], ours[3:], TOLERANCE)
    # Layers without keys and values have no offset.
    offsets = [[getattr(layer, "offset", None) for layer in cache] for cache in caches]
    assert offsets == [[getattr(layer, "offset", None) for layer in c] for c in stock_caches]
    del caches
    assert_nothing_is_used(factory)


def test_caches_of_both_kinds_are_batched_in_any_order() -> None:
    model: Any = small_model("qwen3")
    plain = make_prompt_cache(model)
    greedy(model, PROMPTS[1], plain, 1)
    with PagedCacheFactory(model, max_bytes=64 << 20) as factory:
        served = Served(model, lambda: plain)
        served.insert([[PROMPTS[0]]])
        served.steps(1)
        served.insert([[PROMPTS[4]]], caches=[factory.make_cache()])
        runs = served.finish()
    continued = greedy(model, PROMPTS[0], plain, NEW_TOKENS)
    assert_same_runs(runs, [continued, *expected_runs(model, [PROMPTS[4]])], TOLERANCE)
