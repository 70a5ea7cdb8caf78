"""Prefixes come back from disk in every format and for every kind of layer; failures are misses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory
from paged_kv.store.entry_file import decode
from paged_kv.store.lookup import CHECKPOINT
from paged_kv.store.maintenance import clear
from tests.support.folders import ROOT
from tests.support.generation import assert_same_run, greedy
from tests.support.store_entries import open_store
from tests.support.stored_prompts import TEXT, computed, found, store_of, stored_factory, warm
from tests.support.zoo import small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


KINDS = [
    *[("qwen3", page_format) for page_format in ("fp16", "q8", "q4", "auto", ("q8", "q4"))],
    *[("gemma3_text", page_format) for page_format in ("fp16", "q4")],
    *[("gpt_oss", page_format) for page_format in ("fp16", "q8")],
    *[("qwen3_next", page_format) for page_format in ("fp16", "q4")],
    *[("falcon_h1", page_format) for page_format in ("fp16", "auto")],
    ("deepseek_v3", "fp16"),
    # The first two keep mlx-lm's KVCache beside pages, the last has layers that attend by chunks.
    *[(name, "fp16") for name in ("minimax_m3_vl", "deepseek_v32", "llama4")],
    # These have no pages.
    *[(name, "fp16") for name in ("mamba", "mamba2", "rwkv7", "deepseek_v41")],
]


@pytest.mark.parametrize("length", [300, 40, 764])
@pytest.mark.parametrize(("name", "page_format"), KINDS)
def test_a_restart_goes_on_as_if_there_had_been_none(
    folder: Path, name: str, page_format: Any, length: int
) -> None:
    model = small_model(name)
    factory = stored_factory(model, folder, page_format=page_format)
    cache = factory.make_cache()
    first = greedy(model, TEXT[:length], cache, 4)
    longer = TEXT[:length] + first.tokens + [5, 6, 7]
    factory.insert_cache(longer, cache)
    del cache
    before, cached = warm(model, factory, longer)
    assert cached == length + 4
    factory.close()

    model = small_model(name)
    factory = stored_factory(model, folder, page_format=page_format)
    after, cached = warm(model, factory, longer)
    assert cached == length + 4
    assert after.tokens == before.tokens
    assert mx.array_equal(after.logprobs, before.logprobs)
    stats = store_of(factory).stats()
    assert (stats.tokens_found, stats.errors, stats.dropped) == (length + 4, {}, {})
    factory.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "rwkv7"])
def test_a_process_that_is_ended_has_stored_what_it_inserted(folder: Path, name: str) -> None:
    model = small_model(name)
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    store_of(factory).flush()
    # The other process still runs, and has closed nothing.
    cached = found(model, folder, [*TEXT[:600], 1, 2])
    # Models whose layers can all resume from any token have stored whole blocks so far, the others
    # everything.
    assert cached == (512 if name == "qwen3" else 600)
    factory.close()
    assert found(model, folder, [*TEXT[:600], 1, 2]) == 600


def test_prompts_that_part_share_what_is_stored(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:1000])
    computed(model, factory, [*TEXT[:512], *TEXT[600:900]])
    factory.close()
    # Two of each prompt's four blocks are the same.
    with open_store(folder) as store:
        assert len(store.stored_keys()) == 4 + 2
    assert found(model, folder, TEXT[:1100]) == 1000
    assert found(model, folder, [*TEXT[:512], *TEXT[600:1000]]) == 512 + 300
    # To the token, as in memory.
    assert found(model, folder, [*TEXT[:300], 1, *TEXT[301:900]]) == 300


def test_nothing_is_stored_that_ends_within_a_quantised_page(folder: Path) -> None:
    """A state is kept after 45 tokens, whose page is quantised before it could be stored again."""
    model = small_model("falcon_h1")
    factory = stored_factory(model, folder, page_format="q8")
    cache = factory.make_cache()
    model(mx.array([TEXT[:45]]), cache=cache)
    assert factory.insert_cache(TEXT[:45], cache) == 45
    store_of(factory).flush()
    with open_store(folder) as store:
        assert {row.num_tokens for row in store.rows()} == {45}
        clear(store)
    model(mx.array([TEXT[45:300]]), cache=cache)
    factory.insert_cache(TEXT[:300], cache)
    del cache
    factory.close()
    with open_store(folder) as store:
        assert {row.num_tokens for row in store.rows()} == {256, 44}
    assert found(model, folder, [*TEXT[:250], 1, 2], page_format="q8") == 0
    assert found(model, folder, TEXT[:400], page_format="q8") == 300


@pytest.mark.parametrize(("page_format", "known"), [("fp16", 270), ("q8", 256)])
def test_a_quantised_block_that_goes_on_differently_is_not_read(
    folder: Path, page_format: str, known: int
) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder, page_format=page_format)
    computed(model, factory, TEXT[:600])
    factory.close()
    factory = stored_factory(model, folder, page_format=page_format)
    _, cached = factory.fetch_cache([*TEXT[:270], 1, 2])
    assert cached == store_of(factory).stats().tokens_found == known
    assert factory.stats().blocks_cached + factory.stats().blocks_used == -(-known // 256)
    factory.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize(("length", "answer"), [(40, 4), (612, 100), (700, 90)])
def test_a_prompt_that_was_stored_with_its_answer_is_found_to_the_token(
    folder: Path, name: str, length: int, answer: int
) -> None:
    """In the last block of the stored prompt, and in one that the answer filled."""
    model = small_model(name)
    prompt = TEXT[:length]
    factory = stored_factory(model, folder)
    cache, _ = factory.fetch_cache(prompt)
    first = greedy(model, prompt, cache, answer)
    factory.insert_cache(prompt + first.tokens, cache)
    del cache
    factory.close()
    for asked, known in (
        (prompt, length - 1),
        ([*prompt, first.tokens[0], 1, 2], length + 1),
        ([*prompt[: length - 2], 1, 2], length - 2),
    ):
        factory = stored_factory(model, folder)
        run, cached = warm(model, factory, asked)
        assert (cached, store_of(factory).stats().tokens_found) == (known, known)
        cold = greedy(model, asked, PagedCacheFactory(model).make_cache(), 4)
        assert_same_run(run, cold, 1e-3)
        factory.close()


def test_what_is_found_in_a_block_is_used_later_than_others(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    for first in (1, 2):
        computed(model, factory, [first, *TEXT[:40]])
    factory.close()
    assert found(model, folder, [1, *TEXT[:30]]) == 30
    with open_store(folder) as store:
        latest, _ = store.rows()
        entry = decode(store.folder.read(f"{latest.key}.safetensors"), latest.key)
    assert entry.place.link.tokens == (1, *TEXT[:40])


def test_what_memory_lost_comes_back_from_disk(folder: Path) -> None:
    model = small_model("qwen3")
    probe = PagedCacheFactory(model)
    probe.can_admit(1)
    block_bytes = probe.pool.groups[0].allocator.formats[0].block_bytes
    factory = stored_factory(model, folder, max_bytes=6 * block_bytes)
    prompts = [[first, *TEXT[:600]] for first in range(8)]
    for prompt in prompts:
        computed(model, factory, prompt)
    store_of(factory).flush()
    assert factory.stats().evictions["room"] > 0
    for prompt in prompts:
        asked = [*prompt, 1, 2, 3]
        run, cached = warm(model, factory, asked)
        assert cached == 601
        if prompt in (prompts[0], prompts[-1]):  # The first and the last are lost.
            cold = greedy(model, asked, PagedCacheFactory(model).make_cache(), 4)
            assert_same_run(run, cold, 1e-4)
    assert store_of(factory).stats().tokens_found > 0
    assert factory.stats().allocation_failures == 0
    factory.close()


def test_what_memory_has_no_room_for_is_a_miss(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT)
    factory.close()
    probe = PagedCacheFactory(model)
    probe.can_admit(1)
    block_bytes = probe.pool.groups[0].allocator.formats[0].block_bytes
    factory = stored_factory(model, folder, max_bytes=3 * block_bytes)
    held = factory.make_cache()
    greedy(model, TEXT[:300], held, 1)
    assert factory.fetch_cache(TEXT)[1] == 0
    factory.pool.check()
    assert factory.stats().blocks_used == 2
    factory.close()


def test_pages_come_back_in_the_formats_that_they_had(folder: Path) -> None:
    model = small_model("qwen3")
    probe = PagedCacheFactory(model)
    probe.can_admit(1)
    block_bytes = probe.pool.groups[0].allocator.formats[0].block_bytes
    factory = stored_factory(model, folder, page_format="auto", max_bytes=4 * block_bytes)
    computed(model, factory, TEXT[:1100])

    def blocks_by_format() -> dict[str, int]:
        formats = factory.stats().formats
        held = {each.page_format: each.used + each.cached for each in formats}
        return {name: count for name, count in held.items() if count}

    before = blocks_by_format()
    assert len(before) > 1
    factory.close()
    runs = []
    for _ in range(2):
        factory = stored_factory(model, folder, page_format="auto")
        cache, cached = factory.fetch_cache([*TEXT[:1100], 1])
        assert cached == 1100
        assert blocks_by_format() == before
        runs.append(greedy(model, [1], cache, 4))
        factory.close()
    assert mx.array_equal(runs[0].logprobs, runs[1].logprobs)
    cold = greedy(model, [*TEXT[:1100], 1], PagedCacheFactory(model).make_cache(), 4)
    assert_same_run(runs[0], cold, 0.5)


def test_a_damaged_file_shortens_what_is_found(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:1100])
    factory.close()
    with open_store(folder) as store:
        order = {
            row.key: decode(store.folder.read(f"{row.key}.safetensors"), row.key)
            for row in store.rows()
        }
    (third,) = [key for key, entry in order.items() if entry.place.link.start == 512]
    path = folder / f"{third}.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    factory = stored_factory(model, folder)
    prompt = [*TEXT[:1100], 1]
    run, cached = warm(model, factory, prompt)
    assert cached == 512
    cold = greedy(model, prompt, PagedCacheFactory(model).make_cache(), 4)
    assert_same_run(run, cold, 1e-4)
    assert store_of(factory).stats().errors == {"damaged": 1}
    # The factory computes it again, and stores it again.
    computed(model, factory, TEXT[:1100])
    factory.close()
    assert found(model, folder, prompt) == 1100


@pytest.mark.parametrize(
    ("name", "part"),
    [("gemma3_text", "pages 0"), ("gemma3_text", "pages 1"), ("qwen3_next", CHECKPOINT)],
)
def test_a_damaged_end_leaves_the_one_before(folder: Path, name: str, part: str) -> None:
    model = small_model(name)
    factory = stored_factory(model, folder)
    for length in (300, 700):
        computed(model, factory, TEXT[:length])
    factory.close()
    prompt = [*TEXT[:700], 1, 2]
    assert found(model, folder, prompt) == 700
    with open_store(folder) as store:
        rows = [row for row in store.rows() if row.part == part]
    (last,) = [row for row in rows if row.num_tokens == 700 - 512]
    path = folder / f"{last.key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    factory = stored_factory(model, folder)
    run, cached = warm(model, factory, prompt)
    assert cached == 300
    cold = greedy(model, prompt, PagedCacheFactory(model).make_cache(), 4)
    assert_same_run(run, cold, 1e-3)
    factory.close()


def test_slots_that_hold_no_tokens_are_stored_as_zeros(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    # Another user's prompt leaves its numbers in the pages.
    cache = factory.make_cache()
    greedy(model, TEXT[300:800], cache, 1)
    del cache
    computed(model, factory, TEXT[:40])
    factory.close()
    with open_store(folder) as store:
        (row,) = store.rows()
        entry = decode(store.folder.read(f"{row.key}.safetensors"), row.key)
    for layer, pages in factory.pool.groups[0].pages.items():
        geometry = pages.geometry
        words = entry.arrays[f"layer.{layer}"].reshape(2 * geometry.k_heads, 256, -1)
        assert words[:, :40].any()
        assert not words[:, 40:].any()


def test_a_disk_that_fails_changes_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    store = store_of(factory)

    def fail(*arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    for name in ("read", "write", "scan"):
        assert store.folder is not None
        monkeypatch.setattr(store.folder.store.folder, name, fail)
    cold = greedy(model, TEXT[:600], PagedCacheFactory(model).make_cache(), 4)
    for _ in range(2):
        run, _ = warm(model, factory, TEXT[:600])
        assert run.tokens == cold.tokens
        computed(model, factory, TEXT[:600])
        store.flush()
    factory.close()
    assert store.stats().errors.keys() == {"OSError"}
    assert store.stats().dropped["the disk failed"] >= 2 + 2
    assert store.stats().entries_written == store.stats().tokens_found == 0


def test_mlx_lms_files_work_beside_a_store(folder: Path, tmp_path: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    cache, cached = factory.fetch_cache(TEXT[:601])
    assert cached == 600
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    ours = greedy(model, TEXT[600:601], cache, 4)
    assert greedy(model, TEXT[600:601], loaded, 4).tokens == ours.tokens
    factory.close()


def test_what_cannot_be_stored_is_refused(folder: Path) -> None:
    model = small_model("qwen3")
    with pytest.raises(ValueError, match="'50GBB' is not a size; write one like"):
        stored_factory(model, folder, store_bytes="50GBB")
    with pytest.raises(ValueError, match="store_bytes must be at least"):
        stored_factory(model, folder, store_bytes=1000)
    assert not folder.exists()


def test_the_core_of_the_store_loads_no_mlx() -> None:
    code = """
import sys
import paged_kv.store.background, paged_kv.store.maintenance, paged_kv.commands.store_command
print([name for name in sys.modules if name.partition(".")[0] in ("mlx", "mlx_lm")])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
