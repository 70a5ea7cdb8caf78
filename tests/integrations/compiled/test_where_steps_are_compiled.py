"""Which steps are compiled, and which of those are compared with Python's."""

import logging
from pathlib import Path

import pytest

from benches.host_cost import GraphMaker
from paged_kv import PagedCacheFactory
from paged_kv.integrations.compiled.recordings import (
    LAST_DOUBLING,
    Comparisons,
    compiles,
)
from paged_kv.kernels.backends import Verdict, record_verdict, variant
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import warn_once
from tests.support.zoo import small_model


def test_steps_that_are_compared() -> None:
    comparisons = Comparisons()
    steps = range(1, 3 * LAST_DOUBLING + 1)
    due = [step for step in steps if comparisons.is_due(is_first=step == 700)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 700, 1024, 1536]
    # One difference is chance, and two in turn are not: another step is compared.
    found = [comparisons.is_wrong(each) for each in (False, True, False)]
    assert [comparisons.is_due(is_first=False) for _ in range(3)] == [True] * 3
    assert [*found, comparisons.is_wrong(False)] == [False, False, False, True]


def test_where_steps_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PAGED_KV_COMPILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu, plain = GpuBackend("metal", GraphMaker()), Backend()
    with caplog.at_level(logging.WARNING, logger="paged_kv"):
        warn_once.cache_clear()
        assert [compiles(None, gpu) for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1
    record_verdict(variant(gpu), Verdict(disabled=False))
    assert not compiles(None, gpu)
    for backend in (gpu, plain):
        record_verdict(variant(backend), Verdict(disabled=False, compiles=True))
    assert compiles(None, gpu)
    assert not compiles(None, plain)
    assert compiles(True, plain)
    monkeypatch.setenv("PAGED_KV_COMPILE", "0")
    assert not compiles(None, gpu)
    monkeypatch.setenv("PAGED_KV_COMPILE", "1")
    assert compiles(None, plain)
    assert not compiles(False, plain)
    monkeypatch.setenv("PAGED_KV_COMPILE", "yes")
    with pytest.raises(ValueError, match="PAGED_KV_COMPILE"):
        PagedCacheFactory(small_model("llama"))
    with pytest.raises(TypeError, match="compile"):
        PagedCacheFactory(small_model("llama"), compile="no")  # type: ignore[arg-type]
