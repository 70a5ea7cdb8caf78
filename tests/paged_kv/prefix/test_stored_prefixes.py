"""Prefixes come back from disk in every format and for every kind of layer; failures are misses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.store.entry_file import decode
from paged_kv.store.keys import CHECKPOINT
from tests.support.folders import ROOT
from tests.support.generation import assert_same_run, greedy
from tests.support.store_entries import stored_entries
from tests.support.stored_prompts import (
    TEXT,
    computed,
    found,
    shallow_model,
    store_of,
    stored_factory,
    warm,
)
from tests.support.zoo import small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


# With the four tokens of an answer, prompts end where a page does.
FEW: list[tuple[Any, ...]] = [
    ("qwen3", "auto", 252),
    ("gemma3_text", "q4", 764),
    ("gpt_oss", "fp16", 252),
    ("falcon_h1", "fp16", 252),
]
MORE: list[tuple[Any, ...]] = [
    ("qwen3", ("q8", "q4"), 764),
    ("gemma3_text", "fp16", 252),
    ("qwen3_next", "q8", 252),
    # These keep mlx-lm's KVCache beside pages.
    ("minimax_m3_vl", "fp16", 252),
    ("deepseek_v32", "fp16", 252),
    # Layers that attend by chunks.
    ("llama4", "fp16", 252),
    # No pages.
    ("mamba", "fp16", 252),
    ("rwkv7", "fp16", 252),
]


def test_a_prompt_that_is_found_in_memory_counts_as_one_use(folder: Path) -> None:
    model = shallow_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    factory.fetch_cache(TEXT[:500])
    (node, *_) = factory.pool.index.nodes()
    assert node.use.times == 2
    factory.close()


@pytest.mark.parametrize(
    ("name", "page_format", "length"),
    [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
@pytest.mark.slow
def test_a_restart_goes_on_as_if_there_had_been_none(
    folder: Path, name: str, page_format: Any, length: int
) -> None:
    model = shallow_model(name) if (name, page_format, length) in FEW else small_model(name)
    factory = stored_factory(model, folder, page_format=page_format)
    cache = factory.make_cache()
    first = greedy(model, TEXT[:length], cache, 4)
    longer = TEXT[:length] + first.tokens + [5, 6, 7]
    factory.insert_cache(longer, cache)
    del cache
    before, cached = warm(model, factory, longer)
    assert cached == length + 4
    factory.close()
    if page_format == "fp16":
        cold = greedy(model, longer, PagedCacheFactory(model).make_cache(), 4)
        assert_same_run(before, cold, 1e-3)

    factory = stored_factory(model, folder, page_format=page_format)
    after, cached = warm(model, factory, longer)
    assert cached == length + 4
    assert after.tokens == before.tokens
    assert mx.array_equal(after.logprobs, before.logprobs)
    stats = store_of(factory).stats()
    assert (stats.tokens_found, stats.errors, stats.dropped) == (length + 4, {}, {})
    factory.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "falcon_h1"])
def test_a_process_that_is_ended_has_stored_the_full_pages_that_it_inserted(
    folder: Path, name: str
) -> None:
    model = shallow_model(name)
    factory = stored_factory(model, folder)
    for length in (512, 600):
        computed(model, factory, TEXT[:length])
    store_of(factory).flush()
    # The other process still runs, and has closed nothing.
    assert found(model, folder, [*TEXT[:600], 1, 2]) == 512
    factory.close()
    assert {len(each.place.link.tokens) for each in stored_entries(folder)} == {256}


@pytest.mark.parametrize(
    ("name", "part"),
    [("gemma3_text", "pages 1"), ("falcon_h1", CHECKPOINT)],
)
@pytest.mark.slow
def test_a_damaged_end_leaves_the_one_before(folder: Path, name: str, part: str) -> None:
    model = shallow_model(name)
    factory = stored_factory(model, folder)
    for length in (256, 768):
        computed(model, factory, TEXT[:length])
    factory.close()
    prompt = [*TEXT[:768], 1, 2]
    assert found(model, folder, prompt) == 768
    for path in folder.glob("*.safetensors"):
        place = decode(path.read_bytes(), None).place
        if (place.part, place.link.end) == (part, 768):
            path.write_bytes(path.read_bytes()[:-1])
    factory = stored_factory(model, folder)
    run, cached = warm(model, factory, prompt)
    assert cached == 256
    cold = greedy(model, prompt, PagedCacheFactory(model).make_cache(), 4)
    assert_same_run(run, cold, 1e-3)
    factory.close()


def test_a_disk_that_fails_changes_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shallow_model("qwen3")
    factory = stored_factory(model, folder)
    store: Any = store_of(factory)

    def fail(*arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    for name in ("_read", "sizes", "_write", "_scan"):
        monkeypatch.setattr(store.tiers[0].blobs, name, fail)
    cold = greedy(model, TEXT[:600], PagedCacheFactory(model).make_cache(), 4)
    for _ in range(2):
        run, _ = warm(model, factory, TEXT[:600])
        assert run.tokens == cold.tokens
        computed(model, factory, TEXT[:600])
        store.flush()
    factory.close()
    assert store.stats().errors.keys() == {"OSError"}
    assert sum(store.stats().dropped.values()) >= 2 + 2
    assert store.stats().entries_written == store.stats().tokens_found == 0


@pytest.mark.slow
def test_the_core_of_the_store_loads_no_mlx() -> None:
    code = """
import sys
import paged_kv.command_line
assert "numpy" not in sys.modules, "each command would begin later"
import paged_kv.store.tiered_store, paged_kv.store.blob_store
print([name for name in sys.modules if name.partition(".")[0] in ("mlx", "mlx_lm")])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
