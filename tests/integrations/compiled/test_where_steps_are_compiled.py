"""Which steps are compiled, and which of those are compared with Python's."""

import pytest

from benches.host_cost import GraphMaker
from paged_kv import PagedCacheFactory
from paged_kv.integrations.compiled.recordings import LAST_DOUBLING, Comparisons, compiles
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages.backend import Backend
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


def test_where_steps_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_KV_COMPILE")
    gpu, plain = GpuBackend("metal", GraphMaker()), Backend()
    assert compiles(None, gpu) is None
    assert compiles(None, plain) is False
    assert compiles(True, plain)
    monkeypatch.setenv("PAGED_KV_COMPILE", "0")
    assert compiles(None, gpu) is False
    monkeypatch.setenv("PAGED_KV_COMPILE", "1")
    assert compiles(None, plain)
    assert not compiles(False, plain)
    monkeypatch.setenv("PAGED_KV_COMPILE", "yes")
    with pytest.raises(ValueError, match="PAGED_KV_COMPILE"):
        PagedCacheFactory(small_model("llama"))
    with pytest.raises(TypeError, match="compile"):
        PagedCacheFactory(small_model("llama"), compile="no")  # type: ignore[arg-type]
