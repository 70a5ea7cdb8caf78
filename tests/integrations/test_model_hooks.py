"""Only the modules of a model meet replaced functions, and only while caches of it exist."""

import gc
import importlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models import base

from paged_kv import PagedCacheFactory
from paged_kv.integrations.attention_hook import ATTENTION, paged_attention
from paged_kv.integrations.model_hooks import ModelHooks, Undo
from tests.support.generation import greedy
from tests.support.zoo import small_model

# Not by `import`: these modules do not say that they have the names of what they import.
gemma2, llama, qwen3_next = (
    importlib.import_module(f"mlx_lm.models.{name}") for name in ("gemma2", "llama", "qwen3_next")
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STOCK_ATTENTION = base.scaled_dot_product_attention


def names_of_mlx() -> list[Any]:
    found: list[Any] = [*vars(mx).items(), *vars(mx.fast).items()]
    return [*found, *vars(base).items(), PromptProcessingBatch.prompt]


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether all names mean the same objects."""
    pairs = zip(some, others, strict=True)
    return all(
        one is other or (one[0], id(one[1])) == (other[0], id(other[1])) for one, other in pairs
    )


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Earlier tests' caches are gone, and so are those of this one."""
    gc.collect()
    before = names_of_mlx()
    yield
    gc.collect()
    assert same(before, names_of_mlx())


@pytest.mark.parametrize(("module", "is_needed"), [(llama, False), (gemma2, True)])
def test_operations_are_replaced_only_where_a_trial_shows_the_need(
    module: ModuleType, is_needed: bool
) -> None:
    factory = PagedCacheFactory(small_model(module.__name__.split(".")[-1]), compile=False)
    factory.make_cache()
    assert (module.mx is not mx) == is_needed
    assert (module.mx.tanh is not mx.tanh) == is_needed
    assert module.mx.exp is mx.exp
    # Modules of other models are left alone.
    assert qwen3_next.scaled_dot_product_attention is STOCK_ATTENTION
    assert qwen3_next.mx is vars(base)["mx"] is mx
    factory.close()
    assert module.mx is mx


def test_all_names_of_a_module_are_replaced_and_put_back() -> None:
    early = ModuleType("early")
    names = {"attention": STOCK_ATTENTION, "alias": STOCK_ATTENTION, "base": base, "other": len}
    vars(early).update(names)
    removals = [ATTENTION.install([early]) for _ in range(2)]
    assert early.attention is early.alias is early.base.scaled_dot_product_attention
    assert early.attention is paged_attention
    assert (early.other, early.base.create_causal_mask) == (len, base.create_causal_mask)
    early.alias = None  # type: ignore[attr-defined]  # whoever changes a name meanwhile keeps the change
    removals[0]()
    assert early.attention is paged_attention
    removals[1]()
    assert {name: vars(early)[name] for name in names} == {**names, "alias": None}


def test_a_class_that_inherits_its_call_gets_no_own() -> None:
    class Renamed(type(small_model("llama"))):  # type: ignore[misc]
        pass

    model = Renamed(small_model("llama").args)
    factory = PagedCacheFactory(model)
    greedy(model, PROMPT, factory.make_cache(), 4)
    assert "__call__" in vars(Renamed)
    factory.close()
    gc.collect()
    assert "__call__" not in vars(Renamed)
    assert model(mx.array([PROMPT])).shape[1] == len(PROMPT)


def test_factories_in_threads_leave_nothing() -> None:
    models = [small_model("gemma2", num_hidden_layers=1) for _ in range(3)]

    def use(model: Any) -> None:
        for _ in range(3):
            with PagedCacheFactory(model, max_bytes=64 << 20) as factory:
                greedy(model, PROMPT, factory.make_cache(), 2)
                assert factory.stats().gather_fallbacks == 0
            factory.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(use, models))
    gc.collect()
    assert gemma2.mx is mx


def test_two_threads_that_share_a_factory_replace_once() -> None:
    hooks, second = ModelHooks(), threading.Event()
    changes: list[None] = []

    def install() -> Undo:
        changes.append(None)
        if len(changes) > 1:
            second.set()
        second.wait(0.2)  # the other thread must not get here meanwhile
        return changes.clear

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(hooks.add, ["all"] * 2, [install] * 2))
    assert len(changes) == 1
    del hooks
    gc.collect()
    assert not changes
