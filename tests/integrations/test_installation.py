"""Uninstalling restores mlx-lm, and keeps the patches of others."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import cache_prompt, chat, generate, server
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache

from paged_kv import PagedCacheFactory, PagedKVCache
from tests.support.zoo import llama_for, small_model

# `mlx_lm.generate` is a function if somebody imported the package.
MODULES = [mlx_lm_cache, importlib.import_module("mlx_lm.generate"), server, chat, cache_prompt]


@pytest.fixture
def stock_function() -> Callable[..., Any]:
    """mlx-lm's own function, from where no installation replaces it."""
    function: Callable[..., Any] = mlx_lm_cache.make_prompt_cache
    assert function.__module__ == mlx_lm_cache.__name__
    return function


@pytest.fixture
def model_and_tokenizer(trained: Any) -> Any:
    """A small random model with the vocabulary of a trained one."""
    tokenizer = trained("stdlib-llama")[1]
    return llama_for(tokenizer), tokenizer


def assert_nothing_is_installed(stock: Callable[..., Any], model: Any) -> None:
    names = [vars(module)["make_prompt_cache"] for module in MODULES]
    assert all(function is stock for function in names)
    assert {type(cache) for cache in mlx_lm_cache.make_prompt_cache(model)} == {KVCache}


def is_paged(model: Any) -> bool:
    """The caches that every module of mlx-lm makes for a model if nobody gives it one."""
    kinds = {type(cache) for module in MODULES for cache in module.make_prompt_cache(model)}
    assert len(kinds) == 1
    return kinds == {PagedKVCache}


def test_installing_and_uninstalling_twice_is_as_once(
    stock_function: Callable[..., Any], factory: PagedCacheFactory, model_and_tokenizer: Any
) -> None:
    model = model_and_tokenizer[0]
    for end in (factory.uninstall, factory.close):
        for _ in range(2):
            factory.install()
            assert is_paged(model)
        for _ in range(2):
            end()
            assert_nothing_is_installed(stock_function, model)


def test_a_with_ends_its_own_installation_also_by_an_error(
    stock_function: Callable[..., Any], factory: PagedCacheFactory, model_and_tokenizer: Any
) -> None:
    model = model_and_tokenizer[0]

    def body() -> None:
        with factory:
            with factory:
                assert is_paged(model)
            assert is_paged(model)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert_nothing_is_installed(stock_function, model)


def test_two_models_have_pools_of_their_own_and_a_third_has_none(
    stock_function: Callable[..., Any], factory: PagedCacheFactory, model_and_tokenizer: Any
) -> None:
    model, tokenizer = model_and_tokenizer
    second, third = small_model("phi3"), small_model("phi3")
    other = PagedCacheFactory(second)
    with factory:
        with other:
            assert (is_paged(model), is_paged(second), is_paged(third)) == (True, True, False)
            assert mlx_lm_cache.make_prompt_cache(second)[0].pool is other.pool
            for untouched in (third, second):
                assert other.stats().slabs == 0
                generate(untouched, tokenizer, [1, 2, 3], max_tokens=2)
        assert (is_paged(model), is_paged(second)) == (True, False)
        assert other.stats().groups, "its pages were written"
        assert factory.stats().slabs == 0
        # Calls for other models go to mlx-lm's function with all their arguments.
        assert mlx_lm_cache.make_prompt_cache(third, 64)[0].max_size == 64
    assert_nothing_is_installed(stock_function, model)


def test_names_in_modules_imported_before_and_after_are_replaced_and_put_back(
    stock_function: Callable[..., Any],
    factory: PagedCacheFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    modules = {}
    for when in ("before", "after"):
        source = "from mlx_lm.models.cache import make_prompt_cache as new_cache\n"
        (tmp_path / f"imported_{when}.py").write_text(source)
    modules["before"] = importlib.import_module("imported_before")
    with factory:
        modules["after"] = importlib.import_module("imported_after")
        replacement = mlx_lm_cache.make_prompt_cache
        assert replacement is not stock_function
        assert all(module.new_cache is replacement for module in modules.values())
    assert all(module.new_cache is stock_function for module in modules.values())
    for when in modules:
        monkeypatch.delitem(sys.modules, f"imported_{when}")


def test_a_second_factory_of_a_model_and_a_closed_one_are_refused(
    factory: PagedCacheFactory, model_and_tokenizer: Any
) -> None:
    model = model_and_tokenizer[0]
    second = PagedCacheFactory(model)
    with factory:
        with pytest.raises(ValueError, match="installed"):
            second.install()
        second.uninstall()
        second.close()
        assert mlx_lm_cache.make_prompt_cache(model)[0].pool is factory.pool
    for use in (second.install, second.__enter__, second.make_cache):
        with pytest.raises(RuntimeError, match="closed"):
            use()
