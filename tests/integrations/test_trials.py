"""A version of mlx-lm that was not tested is tried before pages are trusted with it."""

import re
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache

from paged_kv import PagedCacheFactory
from paged_kv.extras import TESTED_MLX_LM, MLXLMChanged
from paged_kv.integrations import trials
from paged_kv.integrations.trials import require_trusted
from tests.support.folders import ROOT

make_factory = partial(PagedCacheFactory, max_bytes="64MB")


@pytest.fixture(autouse=True)
def new_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that nobody has tried mlx-lm in."""
    monkeypatch.setattr(trials, "_trusted", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_tested_versions_are_those_that_ci_runs() -> None:
    checks = (ROOT / ".ci" / "check_versions").read_text("utf-8")
    assert {*re.findall(r"mlx-lm==([\d.]+)", checks), version("mlx-lm")} == {*TESTED_MLX_LM}


def test_a_version_that_works_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state: Any = mx.random.state
    key = state[0]
    require_trusted(make_factory)
    assert mx.array_equal(state[0], key)  # the program's seed holds
    tried: list[Any] = []
    require_trusted(tried.append)
    monkeypatch.setattr(trials, "_trusted", set())
    require_trusted(tried.append)  # as another process
    assert not tried
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches" / "paged-kv" / "trials.json"))
    monkeypatch.setattr(trials, "_trusted", set())
    require_trusted(make_factory)  # where the file cannot be written


def _renamed_in_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models look for a member that caches have under a new name."""
    attention = import_module("mlx_lm.models.llama").Attention
    stock = attention.__call__

    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        return stock(self, x, mask, cache if cache is None or cache.joins else None)

    monkeypatch.setattr(attention, "__call__", call)


def _changed_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trim` takes what is to be left, not what is to go."""
    monkeypatch.setattr(KVCache, "trim", lambda self, left: setattr(self, "offset", left))

    def trim(prompt_cache: Any, count: int) -> None:
        for layer in prompt_cache:
            layer.trim(layer.offset - count)

    monkeypatch.setattr(mlx_lm_cache, "trim_prompt_cache", trim)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_renamed_in_models, "generate"),
        (_changed_trimming, "trim"),
    ],
)
@pytest.mark.slow
def test_what_does_not_work_is_named_and_not_recorded(
    change: Any, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(KVCache, "joins", True, raising=False)
    change(monkeypatch)
    with pytest.raises(MLXLMChanged, match=rf"mlx-lm [\d.]+ .*{part}.* 0\.32\.0"):
        require_trusted(make_factory)
    assert not (tmp_path / "caches" / "paged-kv" / "trials.json").exists()
    assert not trials._trusted
