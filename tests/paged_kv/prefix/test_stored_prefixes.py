"""Prefixes come back from disk in every format and for every kind of layer; failures are misses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.store.lookup import CHECKPOINT
from paged_kv.store.maintenance import clear
from tests.support.folders import ROOT
from tests.support.generation import assert_same_run, greedy
from tests.support.store_entries import open_store
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


FEW: list[tuple[Any, ...]] = [
    ("qwen3", "auto", 300),
    ("gemma3_text", "q4", 764),
    ("gpt_oss", "fp16", 40),
    ("falcon_h1", "fp16", 300),
]
MORE: list[tuple[Any, ...]] = [
    ("qwen3", ("q8", "q4"), 764),
    ("gemma3_text", "fp16", 300),
    ("qwen3_next", "q8", 300),
    # These keep mlx-lm's KVCache beside pages.
    ("minimax_m3_vl", "fp16", 300),
    ("deepseek_v32", "fp16", 300),
    # Layers that attend by chunks.
    ("llama4", "fp16", 300),
    # No pages.
    ("mamba", "fp16", 300),
    ("rwkv7", "fp16", 40),
]


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
def test_a_process_that_is_ended_has_stored_what_it_inserted(folder: Path, name: str) -> None:
    model = shallow_model(name)
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


def test_nothing_is_stored_that_ends_within_a_quantised_page(folder: Path) -> None:
    """A state is kept after 45 tokens, whose page is quantised before it could be stored again."""
    model = shallow_model("falcon_h1")
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
    model = shallow_model("qwen3")
    factory = stored_factory(model, folder, page_format=page_format)
    computed(model, factory, TEXT[:600])
    factory.close()
    factory = stored_factory(model, folder, page_format=page_format)
    _, cached = factory.fetch_cache([*TEXT[:270], 1, 2])
    assert cached == store_of(factory).stats().tokens_found == known
    assert factory.stats().blocks_cached + factory.stats().blocks_used == -(-known // 256)
    factory.close()


@pytest.mark.parametrize(
    ("name", "part"),
    [("gemma3_text", "pages 1"), ("falcon_h1", CHECKPOINT)],
)
@pytest.mark.slow
def test_a_damaged_end_leaves_the_one_before(folder: Path, name: str, part: str) -> None:
    model = shallow_model(name)
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


def test_a_disk_that_fails_changes_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shallow_model("qwen3")
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


@pytest.mark.slow
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
