"""Public functions check their arguments: each wrong value raises a TypeError or ValueError that
names the argument, and has no effect."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import (
    OldestFirst,
    PagedCacheFactory,
    PagedKVCache,
    PagePool,
    Sequence,
    generate_samples,
)
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache
from paged_kv.pool.layer_kinds import Window
from tests.support.generation import greedy
from tests.support.stored_prompts import shallow_model

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(300)]
HUGE = 10**5000
NAN = float("nan")
# For arguments that no type checker accepts.
POLICY: Any = OldestFirst

SIZES: list[Any] = [NAN, float("inf"), -1, 0.5, "0", "4GBB", "9" * 5000, HUGE, True, [4]]
MODELS: list[Any] = ["mlx-community/x", None, PagedCacheFactory, mx.array([1.0]), ("model", "tok")]
FORMATS: list[Any] = [
    *(4, None, OldestFirst, ("q8",), ("q8", 4), ("q8", ["q4"]), "q3"),
    *(POLICY(watermark="all"), OldestFirst(page_formats=()), POLICY(page_formats="q8")),
    OldestFirst(page_formats=("q4", "q8")),
]
PATHS: list[Any] = [4, "", "a\0b"]
COUNTS: list[Any] = ["5", 1.5, NAN, True, [1], -1]
TOKENS: list[Any] = [
    *("text", b"text", None, 7, {1: 2}, [1, "2"], [1, 2.0], [True], [0, 1 << 63], [-HUGE]),
    *(mx.array([[1, 2]]), np.array(7), mx.array([1.5])),
]


def each(wrong: dict[str, list[Any]]) -> Iterable[tuple[str, Any]]:
    return ((argument, value) for argument, values in wrong.items() for value in values)


@pytest.fixture(scope="module")
def model() -> Any:
    return shallow_model("qwen3")


def test_of_a_factory(model: Any, tmp_path: Path) -> None:
    for argument, value in each(
        {
            "model": MODELS,
            "page_format": FORMATS,
            "max_bytes": SIZES,
            "write_chunk": COUNTS,
            "store": PATHS,
            "store_bytes": [*SIZES, 1000],
        }
    ):
        arguments = {"model": model, "store": tmp_path / "store", argument: value}
        with pytest.raises((TypeError, ValueError)) as error:
            PagedCacheFactory(**arguments)
        # Of formats it names what is wrong with them.
        assert argument in str(error.value) or argument == "page_format"
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("4GB", 4_000_000_000), (4e9, 4_000_000_000), (1.5, 1), (np.int64(7), 7), ("1.5GiB", 3 << 29)],
)
def test_sizes_are_numbers_or_text(model: Any, size: Any, nbytes: int) -> None:
    assert PagedCacheFactory(model, max_bytes=size).stats().bytes_budget == nbytes
    assert PagePool(1, max_bytes=size).budget.max_bytes == nbytes


def test_of_a_pool() -> None:
    window = Window(300, 1)
    for argument, value in each(
        {
            "num_layers": COUNTS,
            "windows": [[1], {0: 300}, {2: window}, {"0": window}],
            "page_format": FORMATS,
            "max_bytes": SIZES,
            "beside": ["pool"],
            "backend": ["native", 4],
        }
    ):
        arguments: dict[str, Any] = {"num_layers": 2, argument: value}
        with pytest.raises((TypeError, ValueError)) as error:
            PagePool(**arguments)
        assert argument in str(error.value) or argument == "page_format"


def test_of_sequences_and_caches() -> None:
    pool = PagePool(2, max_bytes=1000)
    wrong: list[tuple[Callable[[Any], Any], Any, str]] = [
        (lambda value: PagePool(2, max_bytes=1000, beside=value), pool, "one of the two"),
        (Sequence, "pool", "pool"),
        (lambda value: Sequence(pool, value), "q8", "PageFormat"),
        (lambda value: PagedKVCache(value, 0, []), None, "pool"),
        (lambda value: PagedKVCache(pool, value, []), 2, "pool's 2"),
        (lambda value: PagedKVCache(pool, 0, value), [1], "Sequences"),
        (
            lambda value: PagedKVCache(pool, 0, [value]),
            Sequence(PagePool(1, max_bytes=1000)),
            "same pool",
        ),
        (lambda value: OldestFirst(recent=value), -1, "recent"),
        (lambda value: OldestFirst(recent=value), True, "recent"),
        (lambda value: OldestFirst(last_resort=value), NAN, "last_resort"),
        (lambda value: OldestFirst(last_resort=value), "1", "last_resort"),
    ]
    for call, value, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            call(value)


@pytest.fixture(scope="module")
def used(model: Any) -> tuple[PagedCacheFactory, list[Any]]:
    """A factory that has cached a prompt, and that prompt's cache."""
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    factory.insert_cache(PROMPT, cache)
    return factory, cache


@pytest.mark.parametrize("method", ["fetch_cache", "insert_cache", "pin", "unpin"])
def test_of_what_takes_tokens(used: tuple[PagedCacheFactory, list[Any]], method: str) -> None:
    factory, cache = used
    before = factory.stats(), len(factory.prefixes)
    for argument, value in each({"tokens": TOKENS, "salt": [[1]]}):
        arguments = {"tokens": PROMPT, argument: value}
        if method == "insert_cache":
            arguments["prompt_cache"] = cache
        with pytest.raises((TypeError, ValueError), match=argument.rstrip("s")):
            getattr(factory, method)(**arguments)
        assert (factory.stats(), len(factory.prefixes)) == before


@pytest.mark.parametrize("kind", [mx.array, np.array, tuple, lambda ids: list(map(np.int32, ids))])
def test_token_ids_may_be_an_array(
    used: tuple[PagedCacheFactory, list[Any]], kind: Callable[[list[int]], Any]
) -> None:
    factory, cache = used
    tokens = kind(PROMPT)
    assert factory.insert_cache(tokens, cache) == len(PROMPT)
    assert factory.fetch_cache(tokens)[1] == len(PROMPT) - 1
    assert factory.pin(tokens)
    assert factory.unpin(tokens)


def test_of_a_prompt_cache(model: Any, used: tuple[PagedCacheFactory, list[Any]]) -> None:
    factory, cache = used
    batch = [layer.merge([layer, layer]) for layer in cache]
    wrong: list[tuple[Any, str]] = [
        ("cache", "list of caches"),
        (None, "list of caches"),
        ([], "got 0 and 0"),
        ([*cache, *cache], "got 2 and 2"),
        ([1], "got 1 and 0"),
        (stock_make_prompt_cache(model), "got 1 and 0"),
        (PagedCacheFactory(model).make_cache(), "another factory"),
        (factory.make_cache(64), "max_kv_size"),
        (batch, "one of 2"),
    ]
    before = len(factory.prefixes)
    for value, message in wrong:
        with pytest.raises((TypeError, ValueError), match=f"prompt_cache .*{message}"):
            factory.insert_cache(PROMPT, value)
    assert len(factory.prefixes) == before


def test_of_counts(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    for value in COUNTS:
        for call, argument in (
            (factory.can_admit, "tokens"),
            (factory.pool.can_admit, "tokens"),
            (factory.make_cache, "max_kv_size"),
        ):
            with pytest.raises((TypeError, ValueError), match=argument):
                call(value)
    assert not factory.can_admit(HUGE)


def test_of_samples(trained: Any, model: Any) -> None:
    cache = PagedCacheFactory(model, max_bytes=1 << 24).make_cache()
    tokenizer = trained("stdlib-llama")[1]
    for argument, value in each(
        {
            "model": MODELS,
            "tokenizer": [None, "x"],
            "prompt": [*TOKENS[1:], "", []],
            "n": [*COUNTS, 0],
            "prefill_step_size": [*COUNTS, 0],
            "max_tokens": [*COUNTS[:4], 0, [5, 0]],
            "prompt_cache": [[], "x"],
            "max_token": [5],
            "prompt_caches": [[]],
        }
    ):
        arguments = {
            "model": model, "tokenizer": tokenizer, "prompt": [1, 2], "n": 2, "prompt_cache": cache,
            argument: value,
        }  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=argument):
            generate_samples(**arguments)
        assert cache[0].offset == 0
