"""Fixtures that tests share: the two trained models, and text to prompt them with."""

# Before mlx. The float32 models of these tests run ten times faster with it, and give the same
# tokens without it.
from benches.openblas import LIBRARY as LIBRARY

import gc
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from benches.real_models.folders import CACHE_VARIABLE, cache_folder
from paged_kv import PagedCacheFactory
from paged_kv.integrations import prompt_cache_hook
from paged_kv.integrations.attention_hook import ATTENTION, OPERATIONS
from tests.support.failures import Failures, failing_calls
from tests.support.folders import MODEL_FOLDERS
from tests.support.grids import beyond_the_cover
from tests.support.zoo import llama_for


@pytest.hookimpl(tryfirst=True)  # Before pytest applies -m.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the soak the cases of grids that add no value of an axis."""
    for item in beyond_the_cover(items):
        item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session", autouse=True)
def _own_caches() -> Iterator[None]:
    """What was found of kernels here for this user does not matter to tests, nor the opposite.

    Kernels are checked, and steps compiled, in tests that say so, or where the whole run says so.
    """
    # A process that ends, or a thread, may still write into the folder.
    kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with kept as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache_folder()))  # models are the same for all
        patch.setenv("XDG_CACHE_HOME", folder)
        for each in ("PAGED_KV_CERTIFY", "PAGED_KV_COMPILE"):
            patch.setenv(each, os.environ.get(each, "0"))
        yield


@pytest.fixture
def pages_taken_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes `use_pages` after a test."""
    monkeypatch.setattr(prompt_cache_hook, "_given_to_all", [])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    prompt_cache_hook.MLX_LM_HOOKS.remove()


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder with a short path: on macOS those of `tmp_path` are too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module", autouse=True)
def _settled_modules() -> Iterator[None]:
    """Free what a module made before the next one begins. What exists before the tests, such as
    libraries and all collected tests, is frozen: walking it after each test and each module takes
    200 ms.
    """
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _settled_memory(_settled_modules: None) -> Iterator[None]:
    """Free a test's caches before the next test."""
    yield
    gc.collect()
    mx.clear_cache()


@pytest.fixture(params=["plain", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the backend that the test's pools use."""
    monkeypatch.setenv("PAGED_KV_BACKEND", request.param)
    name: str = request.param
    return name


@pytest.fixture
def checks_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets kernels be checked, and their verdicts be kept for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("PAGED_KV_BACKEND", "PAGED_KV_CERTIFY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def trained() -> Any:
    """A function (name, dtype) -> (model, tokenizer); each is loaded once."""
    loaded: dict[tuple[str, mx.Dtype], Any] = {}

    def get(name: str, dtype: mx.Dtype = mx.float32) -> Any:
        if (name, dtype) not in loaded:
            model, tokenizer, *_ = load(str(MODEL_FOLDERS[name]))
            model.set_dtype(dtype)
            loaded[name, dtype] = model, tokenizer
        return loaded[name, dtype]

    return get


@pytest.fixture(scope="session")
def source_text() -> str:
    """A long piece of Python source, the kind of text the trained models know."""
    import argparse

    return inspect.getsource(argparse)


@pytest.fixture
def model_and_tokenizer(trained: Any) -> Any:
    """A small random model with the vocabulary of a trained one."""
    tokenizer = trained("stdlib-llama")[1]
    return llama_for(tokenizer), tokenizer


@pytest.fixture
def factory(model_and_tokenizer: Any) -> Iterator[PagedCacheFactory]:
    """Uninstalls at the end, so that a failing test leaves nothing installed."""
    made = PagedCacheFactory(model_and_tokenizer[0], max_bytes=128 << 20)
    yield made
    made.close()


@pytest.fixture
def prompts(model_and_tokenizer: Any, source_text: str) -> list[list[int]]:
    """Prompts. The first one crosses a page border during generation."""
    tokens = model_and_tokenizer[1].encode(source_text[20000:22500])
    return [tokens[:245], tokens[100:160], tokens[300:301]]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The `Script` of a model that says what a test wants."""
    from tests.support.agent_model import dictated

    with dictated() as made:
        yield made


@pytest.fixture
def hooked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replaces, in the test's module, what a factory replaces in those of its model."""
    removals = [each.install([request.module]) for each in (ATTENTION, OPERATIONS)]
    yield
    for removal in removals:
        removal()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failures]:
    """Calls of a step that may fail."""
    with failing_calls(monkeypatch) as found:
        yield found
