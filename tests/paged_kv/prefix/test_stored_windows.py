"""Models with windows and states resume from disk after every block with a stored ring, and never
with a wrong page."""

import random
from collections import Counter, abc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedCacheFactory, PagePool, Sequence
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.prefix_node import Node
from paged_kv.integrations.stored_states import StoredStates
from paged_kv.prefix.keeping import Keeping
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.prefix.stored_prefixes import StoredPrefixes
from paged_kv.steps.batch import Batch
from paged_kv.store.background import BackgroundStore
from paged_kv.store.entry_file import decode
from paged_kv.store.keys import Identity
from paged_kv.store.page_store import PageStore
from paged_kv.tiers.tiered_store import TieredStore
from tests.paged_kv.prefix.test_window_reuse import BLOCK_BYTES, Told, numbers
from tests.support import stored_prompts
from tests.support.generation import Run, assert_same_run, greedy
from tests.support.store_entries import identity, open_store
from tests.support.stored_prompts import shallow_model

TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(1500)]
TOLERANCE = 1e-3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextmanager
def stored_factory(model: Any, folder: Path, **options: Any) -> Iterator[PagedCacheFactory]:
    factory = stored_prompts.stored_factory(model, folder, **options)
    yield factory
    factory.pool.check()
    factory.close()
    assert factory.store is not None
    assert factory.store.stats().dropped == {}


def run_of(
    model: Any,
    factory: PagedCacheFactory,
    prompt: list[int],
    *,
    step: int = 2048,
    keep: bool = True,
) -> tuple[Run, int]:
    """A run after the cached part of a prompt, and the length of that part."""
    cache, cached = factory.fetch_cache(prompt)
    run = greedy(model, prompt[cached:], cache, 3, step)
    if keep:
        factory.insert_cache(prompt, cache)
    return run, cached


def cold(model: Any, prompt: list[int], **options: Any) -> Run:
    return greedy(model, prompt, PagedCacheFactory(model, **options).make_cache(), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_format", "step"),
    [("gemma3_text", "fp16", 100), ("gemma3_text", "q4", 2048), ("gpt_oss", "fp16", 2048)],
)
def test_a_restart_goes_on_behind_every_block(
    folder: Path, name: str, page_format: str, step: int
) -> None:
    model = shallow_model(name)
    with stored_factory(model, folder, page_format=page_format) as factory:
        run_of(model, factory, TEXT[:1301], step=step)
        prompts = [[*TEXT[:length], 1, 2, 3] for length in (1280, 512, 256)]
        expected = [run_of(model, factory, prompt, keep=False)[0] for prompt in prompts]
        # Within a block of 16 bits, as far as its page and the pages before hold the window.
        within = [[*TEXT[:length], 4, 5] for length in (700, 520)]
        in_memory = [run_of(model, factory, prompt, keep=False)[1] for prompt in within]
    assert in_memory[0] == (700 if page_format == "fp16" else 512)
    for prompt, before in zip(prompts, expected, strict=True):
        with stored_factory(model, folder, page_format=page_format) as factory:
            run, cached = run_of(model, factory, prompt, keep=False)
        assert cached == len(prompt) - 3
        assert run.tokens == before.tokens
        assert mx.array_equal(run.logprobs, before.logprobs)
        if page_format == "fp16":
            assert_same_run(run, cold(model, prompt), TOLERANCE)
    for prompt, known in zip(within, in_memory, strict=True):
        with stored_factory(model, folder, page_format=page_format) as factory:
            run, cached = run_of(model, factory, prompt, keep=False)
        assert cached == known
        if page_format == "fp16":
            assert_same_run(run, cold(model, prompt), TOLERANCE)


def test_slots_of_rings_that_hold_nothing_are_stored_as_zeros(folder: Path) -> None:
    model = shallow_model("gemma3_text")
    with stored_factory(model, folder) as factory:
        for length in (40, 340):
            # Others leave their numbers in the pages, and the model computes more than it inserts.
            greedy(model, TEXT[300:900], factory.make_cache(), 1)
            cache = factory.make_cache()
            model(mx.array([TEXT[: length + 20]]), cache=cache)
            for layer in cache:
                layer.trim(20)
            factory.insert_cache(TEXT[:length], cache)
        layers = {
            f"layer.{layer}": pages.geometry
            for group in factory.pool.groups
            for layer, pages in group.pages.items()
            if group.window is not None
        }
    slots_of: dict[int, list[list[int]]] = {}
    with open_store(folder) as store:
        for row in store.rows():
            entry = decode(store.folder.read(f"{row.key}.safetensors"), row.key)
            for name in layers.keys() & entry.arrays.keys():
                slots = entry.arrays[name].reshape(2 * layers[name].k_heads, 256, -1)
                used = np.any(slots, axis=(0, 2))
                slots_of.setdefault(row.num_tokens, []).append(np.flatnonzero(used).tolist())
    assert all(slots == list(range(40)) for slots in slots_of[40])
    # A ring of one page: 360 tokens were once written, and 20 of them trimmed.
    assert all(slots == [*range(84), *range(104, 256)] for slots in slots_of[84])


class StoredTold(Told):
    """A pool whose layers hold the given numbers, and its prefixes, with a store."""

    def __init__(self, folder: Path, blocks: int, **options: Any) -> None:
        super().__init__(blocks, **options)
        pages = BackgroundStore(PageStore(folder, 1 << 30, min_free_bytes=0))
        self.store = TieredStore([pages])
        self.stored = StoredPrefixes(self.prefixes, self.store, self.identify, StoredStates())
        self.prefixes.put_below(self.stored)

    def identify(self, namespace: Any) -> Identity:
        return identity(salt=namespace)

    def close(self) -> None:
        self.stored.keep_all()
        self.store.close()


@pytest.mark.slow
def test_random_histories_begin_with_no_wrong_page_from_disk(folder: Path) -> None:
    """With full pools, ending processes and damaged files, everything that is found is right."""
    counts: Counter[str] = Counter()
    history(random.Random(0), folder, counts)
    assert counts["from disk"] > 1000
    assert counts["whole"] > 0
    assert counts["damaged"] > 0


def history(rng: random.Random, folder: Path, counts: Counter[str]) -> None:
    def new() -> StoredTold:
        return StoredTold(folder, 45)

    told = new()
    prompt: list[int] = []
    for _ in range(50):
        if rng.random() < 0.1:
            counts["from disk"] += told.store.stats().tokens_found
            counts["damaged"] += told.store.stats().errors.get("damaged", 0)
            told.close()
            damage(rng, folder)
            told = new()
        # No two positions of a prompt hold the same numbers.
        first = rng.randrange(2)
        # The rule repeats some prompts, so that the cache may know all of them.
        if not prompt or rng.random() < 0.8:
            prompt = [*range(first, first + 2 * rng.randrange(1, 2000), 2), 5000, 5000]
        # Sometimes the earlier process still runs, and memory is full.
        prefix = told.prefixes.fetch("", prompt, told.pool.page_format)
        known, sequence = prefix.num_tokens, prefix.sequence
        told.assert_holds(sequence, prompt[:known])
        counts["whole"] += known > 256 and known == len(prompt) - 2
        goal = rng.randrange(known, len(prompt)) if rng.random() < 0.5 else len(prompt) - 2
        length = known
        try:
            while length < goal:
                step = min(goal - length, rng.choice([30, 256, 700]))
                told.write(sequence, prompt[length : length + step])
                length += step
        except PoolExhausted:
            assert sequence.length == length
        back = min(sequence.rollback, rng.choice([0, 0, 1, 40]))
        for layer in range(5):
            sequence.trim(layer, back)
        told.assert_holds(sequence, prompt[: length - back])
        told.prefixes.insert("", prompt[: length - back], sequence, None)
        told.pool.check()
        del prefix, sequence
    told.close()


def damage(rng: random.Random, folder: Path) -> None:
    """Flip a byte in some files, and remove others."""
    files = sorted(folder.glob("*.safetensors"))
    for path in rng.sample(files, len(files) // 12):
        if rng.random() < 0.3:
            path.unlink()
            continue
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


@pytest.mark.slow
def test_pages_from_disk_exhaust_no_pool(folder: Path) -> None:
    """Prompts of a model with windows, and a pool that holds hardly more than one of them."""
    model = shallow_model("gemma3_text")
    prompts = [[first, *TEXT[: 900 + first]] for first in range(3)]
    with stored_factory(model, folder) as factory:
        for prompt in prompts:
            run_of(model, factory, prompt)
        needed = sum(
            group.blocks_for(len(prompts[-1]) + 3) * group.block_bytes
            for group in factory.pool.groups
        )
    max_bytes = 3 * needed
    with stored_factory(model, folder, max_bytes=max_bytes) as factory:
        for prompt in [*prompts, *reversed(prompts)]:
            assert factory.can_admit(len(prompt) + 3)
            run, cached = run_of(model, factory, prompt)
            assert cached == len(prompt) - 1
            assert_same_run(run, cold(model, prompt), TOLERANCE)
        stats = factory.stats()
        assert sum(stats.evictions.values()) > 0
        assert stats.allocation_failures == 0
    # If a sequence leaves no room, a lookup finds less or nothing, which is not a failure.
    with stored_factory(model, folder, max_bytes=max_bytes // 3) as factory:
        held = factory.make_cache()
        greedy(model, TEXT[5:300], held, 1)
        assert factory.fetch_cache(prompts[0])[1] == 0
        assert factory.stats().allocation_failures == 0


class Emptying:
    """A tier that holds nothing, and asks to evict everything from memory."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.asked = 0

    def load(self, namespace: Hashable, tokens: abc.Sequence[int], keeping: Keeping) -> None:
        self.asked += 1
        self.pool.clear()

    def keep(
        self, namespace: Hashable, nodes: abc.Sequence[Node], num_tokens: int, keeping: Keeping
    ) -> None:
        pass

    def on_evict(self, node: Node) -> None:
        pass


def test_what_goes_while_the_tier_below_is_asked_is_not_used() -> None:
    pool = PagePool(1, max_bytes=60 * BLOCK_BYTES)
    prefixes = PrefixCache(pool, has_states=False)
    sequence = Sequence(pool)
    for start in range(0, 700, 350):
        part = numbers(TEXT[start : start + 350], 0)
        Batch.of(pool, [sequence]).append(0, part, part)
    prefixes.insert("", TEXT[:700], sequence, None)
    del sequence
    assert prefixes.known("", TEXT[:701]) == 700
    lower = Emptying(pool)
    prefixes.put_below(lower)
    prefix = prefixes.fetch("", TEXT[:701], pool.page_format)
    assert (prefix.num_tokens, lower.asked) == (0, 1)
    assert pool.stats().blocks_used == 0
    pool.check()
