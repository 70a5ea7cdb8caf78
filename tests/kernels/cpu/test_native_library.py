"""The choice of a backend, an instruction set and threads; and running without a library."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.kernels.cpu import native_library
from paged_kv.kernels.pages.errors import warn_once
from tests.support.backends import instruction_sets
from tests.support.folders import ROOT


@pytest.fixture(autouse=True)
def _fresh_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test loads the library anew, and so does the next one."""
    for name in ("PAGED_KV_BACKEND", "PAGED_KV_ISA", "PAGED_KV_THREADS"):
        monkeypatch.delenv(name, raising=False)
    native_library.load_native_library.cache_clear()
    warn_once.cache_clear()
    yield
    native_library.load_native_library.cache_clear()


def test_the_library_is_there_where_there_is_a_compiler() -> None:
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        assert native_library.load_native_library()[1] == ""
        assert PagePool(1).stats().backend == "native"


def test_without_a_library_plain_serves_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_library, "LIBRARY", tmp_path / "missing.so")
    with caplog.at_level(logging.WARNING, "paged_kv"):
        assert [PagePool(1).stats().backend for _ in range(3)] == ["plain"] * 3
    (record,) = caplog.records
    assert "it was not built: there was no C++ compiler" in record.message
    pool = PagePool(1)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    step = mx.ones((1, 2, 3, 16))
    assert mx.array_equal(cache.update_and_fetch(step, step)[0], step)


def test_a_file_that_is_no_library_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("text")
    monkeypatch.setattr(native_library, "LIBRARY", broken)
    library, reason = native_library.load_native_library()
    assert library is None
    assert "it does not load" in reason
    assert "broken.so" in reason


def test_forcing_native_without_a_library_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_library, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.setenv("PAGED_KV_BACKEND", "native")
    with pytest.raises(ValueError, match=r"Install a C\+\+ compiler"):
        PagePool(1)
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    assert PagePool(1).stats().backend == "plain"


def test_a_layer_that_native_cannot_hold_is_plain() -> None:
    pool = PagePool(2)
    sequence = Sequence(pool)
    step, odd = mx.ones((1, 2, 3, 16)), mx.ones((1, 2, 3, 12))
    for layer, array in enumerate((step, odd)):
        PagedKVCache(pool, layer, [sequence]).update_and_fetch(array, array)
    names = [pages.backend.name for pages in pool.groups[0].pages.values()]
    assert names == ["native", "plain"]


@pytest.mark.parametrize("name", instruction_sets())
def test_an_instruction_set_can_be_forced(name: str) -> None:
    code = "from paged_kv.kernels.cpu.native_library import load_native_library as f; print(f()[1])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PAGED_KV_ISA": name}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, env=environment
    )
    assert not done.stdout.strip()


@pytest.mark.parametrize("name", ["abacus", "AVX2", "neon,generic"])
def test_an_instruction_set_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PAGED_KV_ISA", name)
    with pytest.raises(ValueError, match=rf"PAGED_KV_ISA must be one of .*generic.* got '{name}'"):
        PagePool(1)


def test_a_number_of_threads_is_taken_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGED_KV_THREADS", "3")
    assert native_library.thread_count() == 3
    for text in ("0", "-1", "two", "1.5", "", "²"):
        monkeypatch.setenv("PAGED_KV_THREADS", text)
        with pytest.raises(ValueError, match="PAGED_KV_THREADS must be"):
            PagePool(1)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"service/cpu.max": "200000 100000", "cpu.max": "max 100000"}, 2),
        ({"service/inner/cpu.max": "max 100000", "service/cpu.max": "400000 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores_are_those_that_the_control_group_pays_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "self"
    own.write_text("0::/service/inner\n")
    monkeypatch.setattr(native_library, "CGROUPS", tmp_path)
    monkeypatch.setattr(native_library, "OWN_CGROUPS", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert native_library.available_cores() == cores
