"""Models whose pages are partly out of memory, beside those whose memory holds all."""

import errno
import itertools
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from paged_kv import OffloadError, PagedCacheFactory, PoolExhausted
from paged_kv.offload.offloaded_layer import OffloadedLayer
from paged_kv.offload.offloading import PageFile
from tests.support.generation import assert_nothing_is_used, assert_same_run, greedy
from tests.support.grids import plain_only
from tests.support.stored_prompts import stored_factory
from tests.support.zoo import model_that_tells_keys_apart, small_model

READ = 768
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(3110)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return model_that_tells_keys_apart()


def page_bytes(model: Any, page_format: str = "fp16") -> int:
    """Bytes of a block, summaries included."""
    factory = PagedCacheFactory(model, read_tokens=READ, page_format=page_format)
    factory.can_admit(0)
    return factory.pool.groups[0].size.written_bytes


def offloading(model: Any, folder: Path, pages: float = 12, **options: Any) -> PagedCacheFactory:
    """A factory whose memory holds so many pages of 16 bits."""
    given: dict[str, Any] = {"read_tokens": READ, "wait_for_pages": True, **options}
    return PagedCacheFactory(
        model, offload=folder, max_bytes=int(pages * page_bytes(model)), **given
    )


@pytest.mark.slow
@pytest.mark.parametrize("page_format", plain_only(["fp16"], ["fp16", "q4"]))
def test_steps_that_read_all_are_exact(model: Any, page_format: str, tmp_path: Path) -> None:
    """Prompts, and decode of what is no longer than may be read."""
    pages = {"fp16": 7, "q4": 5}[page_format]
    prompt = PROMPT[:2600] if page_format == "fp16" else PROMPT * 2
    # Of numbers that differ in their last bits, some get another code.
    tolerance = {"fp16": TOLERANCE, "q4": 0.2}[page_format]
    options: dict[str, Any] = {"read_tokens": 1 << 14, "page_format": page_format}
    factory = offloading(model, tmp_path, pages, **options)
    cache = factory.make_cache()
    ours = greedy(model, prompt, cache, 6)
    others = PagedCacheFactory(model, **options).make_cache()
    assert_same_run(ours, greedy(model, prompt, others, 6), tolerance)
    stats = factory.stats()
    assert stats.requantisations["offloaded"] >= 3
    assert stats.pages_fetched > stats.requantisations["offloaded"]
    assert stats.bytes_offloaded > 0
    factory.pool.check()
    # Sequences go on where they are trimmed to.
    for each in (cache, others):
        back = each[0].offset - 700
        for layer in each:
            layer.trim(back)
    again, wanted = (greedy(model, [5, 6, 7], each, 4) for each in (cache, others))
    assert_same_run(again, wanted, tolerance)
    del cache, each, layer
    assert_nothing_is_used(factory)
    assert factory.stats().bytes_offloaded == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", plain_only(["gpt_oss"], ["gpt_oss", "deepseek_v32"]))
def test_layers_of_other_kinds_are_exact(name: str, tmp_path: Path) -> None:
    """Beside windows, with sinks, and of latents that an indexer chooses."""
    other = small_model(name)
    options: dict[str, Any] = {"read_tokens": 1 << 14}
    whole = PagedCacheFactory(other, **options)
    cache = whole.make_cache()
    wanted = greedy(other, PROMPT, cache, 6)
    held = whole.stats().bytes_mapped
    factory = PagedCacheFactory(other, offload=tmp_path, max_bytes=int(0.7 * held), **options)
    assert_same_run(greedy(other, PROMPT, factory.make_cache(), 6), wanted, 10 * TOLERANCE)
    assert factory.stats().requantisations["offloaded"] >= 4
    factory.pool.check()


@pytest.mark.slow
def test_a_context_of_four_times_the_memory(tmp_path: Path) -> None:
    model, prompt = small_model("qwen3", num_hidden_layers=1), PROMPT * 3
    factory = offloading(model, tmp_path, len(prompt) / 256 / 4, read_tokens=READ)
    cache = factory.make_cache()
    greedy(model, prompt, cache, 8, step=512)
    stats = factory.stats()
    assert stats.bytes_mapped <= factory.pool.budget.max_bytes
    assert stats.bytes_offloaded > 3 * factory.pool.budget.max_bytes * 0.8
    assert stats.tokens_left_out > 0
    factory.pool.check()


@pytest.mark.slow
def test_pages_that_did_not_come_are_left_out_and_counted(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = offloading(model, tmp_path, 14, wait_for_pages=False)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 2)
    before = factory.stats()
    assert before.pages_late == 0  # the first step waits
    coming: list[Future[Any]] = []

    def fetch(self: PageFile, place: Any) -> Future[Any]:
        coming.append(Future())
        return coming[-1]

    monkeypatch.setattr(PageFile, "fetch", fetch)
    for layer in factory.pool.groups[0].pages.values():
        assert isinstance(layer, OffloadedLayer)
        layer.forget_fetches()
        layer._steps = 1  # no first step, which waits
    for token in range(8):
        mx.eval(model(mx.array([[token]]), cache=cache))
    after = factory.stats()
    assert coming
    assert after.pages_fetched == before.pages_fetched
    assert after.pages_late > 0


@pytest.mark.slow
def test_a_disk_that_fails_loses_nothing(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, failures = PROMPT[:2600], list[str]()
    options: dict[str, Any] = {"read_tokens": 1 << 14}
    factory = offloading(model, tmp_path, 8, **options)
    written, calls = os.pwrite, itertools.count(1)

    def fails_at_times(*given: Any) -> int:
        if next(calls) % 5 == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(*given)

    monkeypatch.setattr(os, "pwrite", fails_at_times)
    cache = factory.make_cache()
    while (start := cache[0].offset) < len(prompt) and len(failures) < 300:
        try:
            logits = model(mx.array([prompt[start : start + 100]]), cache=cache)
            mx.eval(logits)
        except PoolExhausted as error:
            failures.append(str(error))
            factory.pool.check()
    assert failures
    assert all("No space left on device" in each for each in failures)
    stock = PagedCacheFactory(model, **options).make_cache()
    for start in range(0, len(prompt), 100):
        wanted = model(mx.array([prompt[start : start + 100]]), cache=stock)
    assert mx.allclose(logits, wanted, atol=TOLERANCE)


@pytest.mark.slow
def test_damaged_contents_are_an_error(model: Any, tmp_path: Path) -> None:
    factory = offloading(model, tmp_path, 9)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    length = cache[0].offset
    assert factory.pool.offloading is not None
    file = factory.pool.offloading.file
    end = os.fstat(file._file.fileno()).st_size
    os.pwrite(file._file.fileno(), b"\xff" * end, 0)
    tokens = mx.array([[1, 2, 3]])
    with pytest.raises(OffloadError, match="written"):
        model(tokens, cache=cache)
    assert cache[0].offset == length
    factory.pool.check()


@pytest.mark.slow
def test_saved_caches_and_prefixes_hold_offloaded_pages(model: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"read_tokens": 1 << 14}
    factory = offloading(model, tmp_path / "pages", 12.5, store=tmp_path / "store", **options)
    cache = factory.make_cache()
    mx.eval(model(mx.array([PROMPT]), cache=cache))
    assert factory.stats().requantisations["offloaded"]
    save_prompt_cache(str(tmp_path / "saved.safetensors"), cache)
    factory.insert_cache(PROMPT, cache)
    factory.close()
    wanted = greedy(model, [*PROMPT, 9], PagedCacheFactory(model, **options).make_cache(), 4)
    restored = load_prompt_cache(str(tmp_path / "saved.safetensors"))
    assert_same_run(greedy(model, [9], restored, 4), wanted, TOLERANCE)
    kept = stored_factory(model, tmp_path / "store", **options)
    assert kept.fetch_cache([*PROMPT, 9])[1] == 0
    kept.close()
    whole = offloading(model, tmp_path / "pages", 16, store=tmp_path / "store", **options)
    found, count = whole.fetch_cache([*PROMPT, 9])
    assert count == len(PROMPT) // 256 * 256
    assert_same_run(greedy(model, [*PROMPT[count:], 9], found, 4), wanted, TOLERANCE)
