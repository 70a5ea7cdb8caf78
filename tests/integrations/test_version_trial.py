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
from paged_kv.integrations import version_trial
from paged_kv.integrations.version_trial import require_trusted
from tests.support.folders import ROOT

make_factory = partial(PagedCacheFactory, max_bytes="64MB")


@pytest.fixture(autouse=True)
def new_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that nobody has tried mlx-lm in."""
    monkeypatch.setattr(version_trial, "_trusted", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_tested_versions_are_those_that_ci_runs() -> None:
    checks = (ROOT / ".ci" / "check_versions").read_text("utf-8")
    assert {*re.findall(r"mlx-lm==([\d.]+)", checks), version("mlx-lm")} == {*TESTED_MLX_LM}


def test_a_version_that_works_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = mx.random.state
    key = state[0]
    require_trusted(make_factory)
    assert mx.array_equal(state[0], key)  # the program's seed holds
    tried: list[Any] = []
    require_trusted(tried.append)
    monkeypatch.setattr(version_trial, "_trusted", set())
    require_trusted(tried.append)  # as another process
    assert not tried


@pytest.mark.slow
def test_without_a_cache_folder_each_process_tries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "caches").write_text("not a folder")
    for _ in range(2):
        monkeypatch.setattr(version_trial, "_trusted", set())
        require_trusted(make_factory)


def _renamed_in_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models write through a method that caches have under a new name."""
    attention = import_module("mlx_lm.models.llama").Attention
    stock = attention.__call__

    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if cache is not None:
            cache.append_and_fetch  # noqa: B018
        return stock(self, x, mask, cache)

    monkeypatch.setattr(KVCache, "append_and_fetch", KVCache.update_and_fetch, raising=False)
    monkeypatch.setattr(attention, "__call__", call)


def _changed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are merged by a function that batches look for on their class."""
    generate = import_module("mlx_lm.generate")
    stock = generate._merge_caches

    def merge(caches: Any) -> Any:
        for layer in caches[0] if caches else []:
            layer.joins  # noqa: B018
        return stock(caches)

    monkeypatch.setattr(KVCache, "joins", True, raising=False)
    monkeypatch.setattr(generate, "_merge_caches", merge)


def _changed_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trim` takes what is to be left, not what is to go."""
    monkeypatch.setattr(KVCache, "trim", lambda self, left: setattr(self, "offset", left))

    def trim(prompt_cache: Any, count: int) -> None:
        for layer in prompt_cache:
            layer.trim(layer.offset - count)

    monkeypatch.setattr(mlx_lm_cache, "trim_prompt_cache", trim)


def _changed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files hold another attribute of caches."""

    def save(file: str, prompt_cache: Any) -> None:
        mx.save_safetensors(file, {str(at): each.keys for at, each in enumerate(prompt_cache)})
        [each.layout for each in prompt_cache]

    monkeypatch.setattr(KVCache, "layout", "dense", raising=False)
    monkeypatch.setattr(mlx_lm_cache, "save_prompt_cache", save)
    loaded = [KVCache() for _ in range(2)]
    monkeypatch.setattr(mlx_lm_cache, "load_prompt_cache", lambda file: loaded)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_renamed_in_models, "generate"),
        (_changed_batches, "batches"),
        (_changed_trimming, "trim"),
        (_changed_files, "save and load"),
    ],
)
@pytest.mark.slow
def test_what_does_not_work_is_named_and_not_recorded(
    change: Any, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change(monkeypatch)
    with pytest.raises(MLXLMChanged, match=rf"mlx-lm [\d.]+ .*{part}.* 0\.32\.0"):
        require_trusted(make_factory)
    assert not (tmp_path / "caches").exists()
    assert not version_trial._trusted
