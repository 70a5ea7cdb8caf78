"""Models with windows and states resume from disk after every block with a stored ring, and never
with a wrong page."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.integrations.stored_pages import pack, unpack
from paged_kv.prefix.stored_prefixes import StoredPrefixes
from paged_kv.store.folder_store import FolderStore
from paged_kv.store.keys import Identity
from paged_kv.store.tiered_store import TieredStore, folder_tier
from tests.paged_kv.prefix.test_window_reuse import Told
from tests.support import stored_prompts
from tests.support.generation import Run, assert_same_run, greedy
from tests.support.store_entries import identity
from tests.support.stored_prompts import cold, shallow_model

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
    for prompt, before in zip(prompts, expected, strict=True):
        with stored_factory(model, folder, page_format=page_format) as factory:
            run, cached = run_of(model, factory, prompt, keep=False)
        assert cached == len(prompt) - 3
        assert run.tokens == before.tokens
        assert mx.array_equal(run.logprobs, before.logprobs)
        if page_format == "fp16":
            assert_same_run(run, cold(model, prompt, 3), TOLERANCE)


class StoredTold(Told):
    """A pool whose layers hold the given numbers, and its prefixes, with a store."""

    def __init__(self, folder: Path, blocks: int, **options: Any) -> None:
        super().__init__(blocks, **options)
        self.store = TieredStore([folder_tier(FolderStore(folder, 1 << 30, min_free_bytes=0))])
        self.stored = StoredPrefixes(self.prefixes, self.store, self.identify, pack, unpack)
        self.prefixes.lower = self.stored

    def identify(self, namespace: Any) -> Identity:
        return identity(salt=namespace)

    def close(self) -> None:
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
