"""Prompts of models with windows resume after any computed block while memory holds the cached
out-of-window blocks, and never with a wrong one."""

import copy
import random
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, Sequence
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.pool.layer_kinds import Window
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.steps.batch import Batch
from tests.support import ring_batches
from tests.support.generation import assert_same_run, greedy
from tests.support.invariants import assert_invariants
from tests.support.ring_batches import PAGE_BYTES, append, new_batch
from tests.support.stored_prompts import cold, shallow_model

TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(1500)]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def gemma3() -> Any:
    """A model with windows of 32 tokens, in rings of one page."""
    return shallow_model("gemma3_text")


def warm(model: Any, factory: PagedCacheFactory, prompt: list[int], step: int = 2048) -> Any:
    """A run after the cached part of a prompt, which is inserted, and the length of that part."""
    cache, cached = factory.fetch_cache(prompt)
    run = greedy(model, prompt[cached:], cache, 3, step)
    factory.insert_cache(prompt + run.tokens, cache)
    factory.pool.check()
    return run, cached


@pytest.mark.parametrize("step", [100, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_block_can_be_gone_on_from_after_the_window_has_passed(
    gemma3: Any, step: int
) -> None:
    factory = PagedCacheFactory(gemma3)
    warm(gemma3, factory, TEXT[:1300], step)
    for length in (1290, 800, 513, 512, 300, 257, 100):
        prompt = [*TEXT[:length], 1, 2, 3]
        run, cached = warm(gemma3, factory, prompt)
        # A ring of one page needs a window's worth of slots in the latest page, except where the
        # first prompt ended, as the page still holds slots of the page before.
        is_behind = length % 256 >= 31 or length < 256 or length >= 1280
        assert cached == (length if is_behind else length // 256 * 256)
        assert_same_run(run, cold(gemma3, prompt, 3), TOLERANCE)


# Quantised pages need as many.
DIM = 32
BLOCK_BYTES = 256 * DIM * 2 * 4
# Narrower than a page and wider, in rings of one, two and three pages. Two of the rings can hardly
# be rolled back.
WINDOWS = {1: Window(32, 32), 2: Window(300, 100), 3: Window(512, 256), 4: Window(512, 1)}
# In rings that can be rolled back far.
LOOSE = {1: Window(32, 32), 2: Window(300, 200)}


def numbers(tokens: list[int], layer: int) -> mx.array:
    """The numbers that a layer writes: the tokens themselves."""
    column = np.array(tokens, np.float32)[None, None, :, None] + 10_000 * layer
    return mx.array(np.broadcast_to(column, (1, 1, len(tokens), DIM)).copy())


class Told:
    """A pool whose layers hold the given numbers, and its prefixes."""

    def __init__(self, blocks: int, windows: dict[int, Window] = WINDOWS, **options: Any) -> None:
        self.layers = range(1 + len(windows))
        self.pool = PagePool(
            len(self.layers), windows=windows, max_bytes=blocks * BLOCK_BYTES, **options
        )
        self.prefixes = PrefixCache(self.pool, has_states=False)
        # The pool knows what all layers write after the second step.
        first = Sequence(self.pool)
        for _ in range(2):
            self.write(first, [1, 2])
        del first
        self.pool.clear()

    def fetch(self, tokens: list[int]) -> Any:
        """What is found of a prompt of these tokens and one more."""
        return self.prefixes.fetch("", [*tokens, 0], self.pool.page_format)

    def write(self, sequence: Sequence, tokens: list[int]) -> None:
        for layer in self.layers:
            PagedKVCache(self.pool, layer, [sequence]).make_mask(len(tokens))
            part = numbers(tokens, layer)
            Batch.of(self.pool, [sequence]).append(layer, part, part)

    def assert_holds(self, sequence: Sequence, tokens: list[int]) -> None:
        """Check that every layer holds all tokens that the next query sees."""
        assert set(sequence.context_lens) == {len(tokens)}
        for layer in self.layers:
            window = self.pool.windows.get(layer)
            seen = len(tokens) if window is None else min(len(tokens), window.size - 1)
            keys, _ = PagedKVCache(self.pool, layer, [sequence]).keys_and_values()
            held = np.asarray(mx.array(keys))[0, 0, :, 0]
            expected = np.array(tokens[len(tokens) - seen :]) + 10_000 * layer
            assert (held[len(held) - seen :] == expected).all(), f"layer {layer}"


@pytest.mark.slow
@pytest.mark.parametrize("windows", [WINDOWS, LOOSE])
def test_random_histories_never_begin_with_a_wrong_page(windows: dict[int, Window]) -> None:
    """With forks, trims, insertions, evictions, moves and full pools, everything that is found is
    right."""
    found = [history(random.Random(seed), Told(60, windows)) for seed in range(2)]
    assert sum(found) > 1000


TALES = [[1 + 3 * at + tale for at in range(4000)] for tale in range(3)]


def history(rng: random.Random, told: Told) -> int:
    """The number of tokens found in one of them. Sequences take parts of three texts."""
    pool, prefixes = told.pool, told.prefixes
    rows: list[tuple[Sequence, list[int]]] = []
    texts = [tale[:1500] for tale in TALES]
    found = 0
    for _ in range(150):
        act = rng.random()
        if act < 0.25 or not rows:
            prompt = rng.choice(texts)
            prompt = [*prompt[: rng.randrange(max(0, len(prompt) - 600), len(prompt) + 1)], 0, 0]
            prefix = prefixes.fetch("", prompt, pool.page_format)
            found += prefix.num_tokens
            rows.append((prefix.sequence, prompt[: prefix.num_tokens]))
            prefix.sequence.caches_out_of_window = rng.random() < 0.8
            told.assert_holds(*rows[-1])
        sequence, tokens = rng.choice(rows)
        if act < 0.65:
            tale = rng.choice([*[t for t in TALES if t[: len(tokens)] == tokens] * 9, *TALES])
            to_the_border = -len(tokens) % 256 or 512
            new = tale[len(tokens) :][: rng.choice([1, 3, 30, 100, 700, to_the_border])]
            try:
                told.write(sequence, new)
                tokens += new
            except PoolExhausted:
                assert sequence.length == len(tokens)
        elif act < 0.75:
            prefixes.insert("", tokens, sequence, None)
            texts.append(list(tokens))
        elif act < 0.8:
            count = min(sequence.rollback, rng.choice([1, 40, 120, 200]))
            for layer in told.layers:
                sequence.trim(layer, count)
            del tokens[len(tokens) - count :]
        elif act < 0.85 and len(rows) < 5:
            rows.append((copy_of(sequence), list(tokens)))
        elif act < 0.9:
            pool.compact()
        else:
            rows.remove((sequence, tokens))
        if len(rows) > 5:
            rows.pop(0)
        del sequence
        pool.check()
        assert_invariants(pool.stats(), pool.budget.mapped)
    rows.clear()
    del prefix
    pool.clear()
    assert pool.stats().blocks_used == pool.stats().blocks_cached == 0
    return found


def copy_of(sequence: Sequence) -> Sequence:
    pool = sequence.pool
    caches = [PagedKVCache(pool, layer, [sequence]) for layer in range(pool.num_layers)]
    return copy.deepcopy(caches)[0].sequences[0]


@pytest.mark.parametrize(("begun", "step"), [(520, 256), (800, 700)])
def test_forks_that_go_their_own_ways_leave_their_own_pages(begun: int, step: int) -> None:
    told = Told(100, LOOSE)
    sequence = told.fetch([]).sequence
    told.write(sequence, TALES[0][:begun])
    rows = [(sequence, TALES[0][:begun]), (copy_of(sequence), TALES[0][:begun])]
    del sequence
    for number, (each, tokens) in enumerate(rows):
        while len(tokens) < begun + 1100:
            more = [10 * (number + 1) + at for at in range(step)]
            told.write(each, more)
            tokens += more
    for each, tokens in rows:
        told.prefixes.insert("", tokens, each, None)
    texts = [tokens for _, tokens in rows]
    rows.clear()
    del each
    for tokens in texts:
        for page in range(1, len(tokens) // 256 + 1):
            prefix = told.fetch(tokens[: 256 * page])
            assert prefix.num_tokens == 256 * page
            told.assert_holds(prefix.sequence, tokens[: 256 * page])


@pytest.mark.parametrize("count", [101, 700, 2048])
def test_a_fork_has_a_step_that_is_in_no_page_yet(count: int) -> None:
    pool = PagePool(2, windows={1: Window(300, 100)}, max_bytes=400 * PAGE_BYTES)
    batch = new_batch(pool)
    assert append(batch, 10)
    assert append(batch, count)
    fork = ring_batches.fork(batch)
    for each in (fork, batch):
        for cache in each.layers:
            ring_batches.assert_holds(cache, each.rows)
        assert append(each, 30)


@pytest.mark.parametrize(
    ("steps", "asked"),
    [
        # The last slots of a page that left the window belong to a step that no page holds yet.
        ([512, 30], 512),
        ([500, 12, 30], 512),
        # A page that the window passed holds trimmed tokens.
        ([500, 20, -120, 300], 512),
        ([500, 20, -120, 300], 450),
        # The first slots of a page are lost when a step writes the rest of it.
        ([500, 20, -220, 300], 290),
        ([500, 20, -220, 20, 300], 512),
    ],
)
def test_a_passed_page_holds_all_of_its_tokens_or_is_not_kept(steps: list[int], asked: int) -> None:
    told = Told(100, {1: Window(32, 32)})
    tokens: list[int] = []
    sequence = told.fetch([]).sequence
    for tale, step in enumerate(steps):
        if step < 0:
            for layer in told.layers:
                sequence.trim(layer, -step)
            del tokens[step:]
        else:
            new = TALES[tale % 3][len(tokens) :][:step]
            told.write(sequence, new)
            tokens += new
    told.prefixes.insert("", tokens, sequence, None)
    prefix = told.fetch(tokens[:asked])
    assert prefix.num_tokens >= 256
    told.assert_holds(prefix.sequence, tokens[: prefix.num_tokens])


def test_passed_pages_are_given_up_before_anybody_fails_or_loses_anything() -> None:
    """In the end one sequence needs all of the memory."""
    told = Told(40)
    kept = told.prefixes.fetch("", [7] * 300, told.pool.page_format).sequence
    told.write(kept, [7] * 300)
    told.prefixes.insert("", [7] * 300, kept, None)
    del kept
    sequence = told.prefixes.fetch("", [5] * 4000, told.pool.page_format).sequence
    told.write(sequence, [5] * 2048)
    assert told.pool.stats().blocks_cached > 8
    while told.pool.can_admit(0) and sequence.length < 2048 + 3000:
        told.write(sequence, [5] * 100)
    told.assert_holds(sequence, [5] * sequence.length)
    stats = told.pool.stats()
    assert {reason for reason, count in stats.evictions.items() if count} == {"out_of_window"}
    assert stats.allocation_failures == 0
    assert told.prefixes.fetch("", [7] * 301, told.pool.page_format).num_tokens == 300


def test_rings_on_the_way_of_a_conversation_go_before_its_last_and_those_at_junctions() -> None:
    told = Told(200, {1: Window(300, 256)})
    text = TALES[0]

    def turn(prompt: list[int], answer: int = 0) -> None:
        """Compute a prompt and insert it, with some tokens of an answer or without."""
        prefix = told.fetch(prompt)
        told.write(prefix.sequence, prompt[prefix.num_tokens :])
        told.prefixes.insert("", prompt, prefix.sequence, None)
        if answer:
            told.write(prefix.sequence, [5] * answer)
            told.prefixes.insert("", prompt + [5] * answer, prefix.sequence, None)

    for end in (1000, 2000, 2900):
        turn(text[:end])
    turn([*text[:2000], 7, 7])  # parts from the conversation
    turn(text[:3900], answer=600)
    told.pool.out_of_window.evict(lambda: False)

    def found(prompt: list[int]) -> int:
        tokens: int = told.fetch(prompt).num_tokens
        return tokens

    # An answer does not take the place of its prompt.
    assert found([*text[:3900], *[5] * 600]) == 4500
    assert found([*text[:3900], 8]) == 3900
    assert found([*text[:2000], 8]) == 2000
    assert found([*text[:1000], 8]) == 0
    # Within a page that goes along with a prompt, this one does not begin.
    assert found([*text[:2900], 8]) == 1792
    turn([*text[:3900], *[5] * 600, *text[:900]])
    told.pool.out_of_window.evict(lambda: False)
    assert found([*text[:3900], 8]) == 1792
    assert found([*text[:2000], 7, 7, 8]) == 2002


def test_pages_that_no_prompt_can_resume_from_go_before_those_of_others() -> None:
    told = Told(200, {1: Window(300, 256)})
    idle, other = TALES[0][:2900], TALES[1][:2000]
    for end in (1000, 2000, 2900):  # Uses that the other conversation does not have.
        prefix = told.fetch(idle[:end])
        told.write(prefix.sequence, idle[prefix.num_tokens : end])
        told.prefixes.insert("", idle[:end], prefix.sequence, None)
    prefix = told.fetch(other)
    told.write(prefix.sequence, other)
    told.prefixes.insert("", other, prefix.sequence, None)
    del prefix
    told.pool.stats()  # Releases the blocks of dropped sequences.
    told.pool.out_of_window.evict(lambda: False)

    def found(prompt: list[int]) -> int:
        return told.prefixes.peek("", [*prompt, 0]).num_tokens

    index = told.pool.index
    index.evict(lambda: found(idle) == 0 or found(other) == 0)
    assert (found(idle), found(other)) == (0, 2000)
    left = index.known("", idle).num_tokens // 256
    assert index.evict(lambda: not index.known("", idle).num_tokens) == left > 4
    assert found(other) == 2000


def test_a_pool_goes_with_the_last_prefix_cache_that_holds_it() -> None:
    told = Told(4, {1: Window(300, 256)})
    pool = weakref.ref(told.pool)
    del told
    assert pool() is None
