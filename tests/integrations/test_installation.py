"""Uninstalling restores mlx-lm, and keeps the patches of others."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm import cache_prompt, chat, generate, server
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache

from paged_kv import PagedCacheFactory, PagedKVCache
from tests.support.zoo import small_model

# `mlx_lm.generate` is a function if somebody imported the package.
MODULES = [mlx_lm_cache, importlib.import_module("mlx_lm.generate"), server, chat, cache_prompt]


@pytest.fixture
def stock_function() -> Callable[..., Any]:
    """mlx-lm's own function, from where no installation replaces it."""
    function: Callable[..., Any] = mlx_lm_cache.make_prompt_cache
    assert function.__module__ == mlx_lm_cache.__name__
    return function


def assert_nothing_is_installed(stock: Callable[..., Any], model: Any) -> None:
    names = [vars(module)["make_prompt_cache"] for module in MODULES]
    assert all(function is stock for function in names)
    assert {type(cache) for cache in mlx_lm_cache.make_prompt_cache(model)} == {KVCache}


def is_paged(model: Any) -> bool:
    """The caches that every module of mlx-lm makes for a model if nobody gives it one."""
    kinds = {type(cache) for module in MODULES for cache in module.make_prompt_cache(model)}
    assert len(kinds) == 1
    return kinds == {PagedKVCache}


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
