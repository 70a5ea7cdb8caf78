"""Cached out-of-window blocks of forks: each sequence has its own, and the least recently used go
first."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.pool.window import Window
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.steps.batch import Batch
from tests.support import ring_batches
from tests.support.ring_batches import PAGE_BYTES, append, new_batch

WINDOWS = {1: Window(32, 32), 2: Window(300, 200)}
LAYERS = 1 + len(WINDOWS)


def write(sequence: Sequence, tokens: list[int]) -> None:
    """The numbers that layers write are the tokens themselves."""
    for layer in range(sequence.pool.num_layers):
        part = mx.array(tokens, mx.float32)[None, None, :, None] + 10_000 * layer
        Batch.of(sequence.pool, [sequence]).append(layer, part, part)


def assert_holds(sequence: Sequence, tokens: list[int]) -> None:
    """Check that every layer holds all tokens that the next query sees."""
    assert set(sequence.context_lens) == {len(tokens)}
    for layer in range(LAYERS):
        window = sequence.pool.windows.get(layer)
        seen = len(tokens) if window is None else min(len(tokens), window.size - 1)
        keys, _ = PagedKVCache(sequence.pool, layer, [sequence]).keys_and_values()
        held = np.asarray(mx.array(keys))[0, 0, :, 0]
        assert (held[len(held) - seen :] == np.array(tokens[-seen:]) + 10_000 * layer).all()


def forked(sequence: Sequence) -> Sequence:
    caches = [PagedKVCache(sequence.pool, layer, [sequence]) for layer in range(LAYERS)]
    return copy.deepcopy(caches)[0].sequences[0]


@pytest.mark.parametrize("begun", [300, 520, 800])
@pytest.mark.parametrize("step", [30, 256, 700])
def test_forks_that_go_their_own_ways_leave_their_own_pages(begun: int, step: int) -> None:
    pool = PagePool(LAYERS, windows=WINDOWS, max_bytes=1 << 20)
    prefixes = PrefixCache(pool, has_states=False)
    opening = Sequence(pool)
    for _ in range(2):
        write(opening, [1])
    beginning = list(range(begun))
    sequence = prefixes.fetch("", [0], pool.page_format).sequence
    write(sequence, beginning)
    rows = [(sequence, list(beginning)), (forked(sequence), list(beginning))]
    del sequence
    for number, (each, tokens) in enumerate(rows):
        while len(tokens) < begun + 1100:
            more = [1000 * (number + 1) + at for at in range(step)]
            write(each, more)
            tokens += more
    for each, tokens in rows:
        prefixes.insert("", tokens, each, None)
    texts = [tokens for _, tokens in rows]
    rows.clear()
    del each
    for tokens in texts:
        for page in range(1, len(tokens) // 256 + 1):
            prefix = prefixes.fetch("", [*tokens[: 256 * page], -1], pool.page_format)
            assert prefix.num_tokens == 256 * page
            assert_holds(prefix.sequence, tokens[: 256 * page])


def test_pages_that_were_of_use_outlive_those_that_were_not() -> None:
    pool = PagePool(2, windows={1: Window(32, 32)}, max_bytes=1 << 20)
    prefixes = PrefixCache(pool, has_states=False)
    opening = Sequence(pool)
    for _ in range(2):
        write(opening, [1])
    del opening
    prompts = [list(range(first, first + 600)) for first in (1000, 2000, 3000)]
    for prompt in prompts:
        sequence = prefixes.fetch("", [0], pool.page_format).sequence
        write(sequence, prompt)
        prefixes.insert("", prompt, sequence, None)
        del sequence

    def found(prompt: list[int]) -> int:
        return prefixes.fetch("", [*prompt[:256], -1], pool.page_format).num_tokens

    # Each has left two pages behind, and the first page of all is in use.
    assert found(prompts[0]) == 256
    pool.stats()  # Releases the blocks of dropped sequences.
    allocator = pool.group_of(1).allocator
    left = len(pool.out_of_window.evictable(allocator)) - 3
    assert (
        pool.out_of_window.evict(lambda: len(pool.out_of_window.evictable(allocator)) <= left) == 3
    )
    assert [found(prompt) for prompt in prompts] == [256, 0, 256]


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
