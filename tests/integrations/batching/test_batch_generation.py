"""mlx-lm's BatchGenerator gives every sequence of a paged batch the same tokens as alone."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory, PoolExhausted
from tests.support.generation import (
    Run,
    assert_nothing_is_used,
    assert_same_run,
    assert_same_runs,
    greedy,
)
from tests.support.grids import plain_only
from tests.support.zoo import FAMILIES, small_model

# A batch multiplies a sequence as part of a larger matrix: float32 sums in another order.
TOLERANCE = 2e-3
# mlx-lm's own attention in gemma2 does not accept a batch's mask.
STOCK_CANNOT_BATCH = {"gemma2"}
# Their own batches differ from their single runs: plamo3 attends with a window one token longer in
# longer steps, and minimax_m3_vl chooses blocks of keys that padding shifts.
BATCH_DIFFERS = {"plamo3", "minimax_m3_vl"}
CAN_BATCH = [name for name in FAMILIES if name not in STOCK_CANNOT_BATCH]
# One with a window, one with recurrent layers, one with latent attention, and one with none of
# these.
PLAIN_FAMILIES = ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"]
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


def expected_runs(model: Any, prompts: list[list[int]], step: int = 48) -> list[Run]:
    alone = [greedy(model, p, make_prompt_cache(model), NEW_TOKENS, step) for p in prompts]
    return [alone[0], alone[1], alone[2], alone[3], alone[4]]


def runs_out(work: Callable[[], Any]) -> bool:
    """Whether the pool is exhausted. Drops the traceback, whose frames would hold the sequences."""
    try:
        work()
    except PoolExhausted:
        return True
    return False


@pytest.mark.parametrize("name", plain_only(PLAIN_FAMILIES, CAN_BATCH))
def test_batched_equals_single_equals_stock(name: str) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    ours = staggered(model, factory.make_cache, PROMPTS)
    assert_same_runs(ours, staggered(model, lambda: make_prompt_cache(model), PROMPTS), TOLERANCE)
    if name not in BATCH_DIFFERS:
        assert_same_runs(ours, expected_runs(model, PROMPTS), TOLERANCE)
    assert_nothing_is_used(factory)


@pytest.mark.parametrize("name", plain_only(["stdlib-gemma3"], ["stdlib-llama", "stdlib-gemma3"]))
def test_trained_models_on_real_text(name: str, trained: Any, source_text: str) -> None:
    model, tokenizer = trained(name)
    tokens = tokenizer.encode(source_text)
    prompts = [tokens[100 * i :][:n] for i, n in enumerate((64, 255, 20, 600, 257))]
    factory = PagedCacheFactory(model, max_bytes=128 << 20)
    ours = staggered(model, factory.make_cache, prompts)
    assert_same_runs(ours, expected_runs(model, prompts, 256), TOLERANCE)
    assert factory.stats().gather_fallbacks == 0
    assert_nothing_is_used(factory)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
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


def test_logits_processors_belong_to_their_rows(model: Any) -> None:
    def avoid(token: int) -> Callable[[mx.array, mx.array], mx.array]:
        def processor(tokens: mx.array, logits: mx.array) -> mx.array:
            return mx.where(mx.arange(logits.shape[-1]) == token, -1e9, logits)

        return processor

    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    runs = []
    for make_cache in (lambda: make_prompt_cache(model), factory.make_cache):
        served = Served(model, make_cache)
        free = greedy(model, PROMPTS[1], make_prompt_cache(model), 1).tokens[0]
        served.insert([[PROMPTS[1]]] * 2, logits_processors=[[], [avoid(free)]])
        runs.append(served.finish())
        assert runs[-1][0].tokens[0] == free
        assert free not in runs[-1][1].tokens
    assert_same_runs(runs[1], runs[0], TOLERANCE)
    del served
    assert_nothing_is_used(factory)


def test_extracting_from_a_running_batch_changes_nothing(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    served = Served(model, factory.make_cache)
    uids = served.insert([[PROMPTS[1]], [PROMPTS[4]]])
    served.steps(3)
    cache, tokens = served.generator.extract_cache([uids[0]])[uids[0]]
    held = list(tokens)
    runs = served.finish()
    assert_same_runs(runs, [expected_runs(model, PROMPTS)[index] for index in (1, 4)], TOLERANCE)
    given = len(held) - len(PROMPTS[1])
    assert held == PROMPTS[1] + runs[0].tokens[:given]
    # The cache has the state of that moment, whatever the batch has written since.
    continued = greedy(model, runs[0].tokens[given : given + 1], cache, 1)
    assert continued.tokens[0] == runs[0].tokens[given + 1]
    del cache
    served.responses.clear()
    assert_nothing_is_used(factory)


def factory_of_blocks(model: Any, blocks: int) -> PagedCacheFactory:
    """A factory with a budget for so many blocks. The size of a block is known once a factory has
    been used."""
    probe = PagedCacheFactory(model, max_bytes=64 << 20)
    assert probe.can_admit(1)
    block_bytes = probe.pool.groups[0].allocator.formats[0].block_bytes
    return PagedCacheFactory(model, max_bytes=blocks * block_bytes)


@pytest.mark.parametrize("name", plain_only(["qwen3"], ["qwen3", "qwen3_next"]))
def test_a_step_that_does_not_fit_is_tried_again_without_a_row(name: str) -> None:
    """Also in hybrids: no layer of any kind is ahead of the others."""
    model = small_model(name)
    # Three prompts of one block each, and one more block: two sequences cannot both begin another.
    factory = factory_of_blocks(model, 4)
    served = Served(model, factory.make_cache)
    prompts = [PROMPTS[3][:253], PROMPTS[3][1:255], PROMPTS[1]]
    uids = served.insert([[prompt] for prompt in prompts])
    assert runs_out(served.finish)
    before = [len(served.responses[uid]) for uid in uids]
    assert runs_out(served.finish)
    assert [len(served.responses[uid]) for uid in uids] == before
    served.generator.remove([uids[1]])
    served.finish()
    for index in (0, 2):
        alone = greedy(model, prompts[index], make_prompt_cache(model), NEW_TOKENS, 48)
        assert_same_run(served.run(uids[index]), alone, TOLERANCE)
    served.responses.clear()
    assert_nothing_is_used(factory)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_what_can_be_admitted_is_told_before_insertion(name: str) -> None:
    model = small_model(name)
    small = factory_of_blocks(model, 3)
    served = Served(model, small.make_cache)
    assert small.can_admit(3 * 256)
    assert not small.can_admit(3 * 256 + 1)
    served.insert([[PROMPTS[3]]])
    served.steps(1)
    assert small.can_admit(256)
    assert not small.can_admit(257)
    served.finish()
    served.responses.clear()
    assert small.can_admit(3 * 256)
