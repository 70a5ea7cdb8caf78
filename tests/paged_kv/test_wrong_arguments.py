"""Public functions check their arguments: each wrong value raises a TypeError or ValueError that
names the argument and the value, and has no effect."""

import os
from collections.abc import Callable
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
from paged_kv.pool.window import Window
from tests.support.generation import greedy
from tests.support.zoo import small_model

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(300)]
HUGE = 10**5000
NAN = float("nan")
# For arguments that no type checker accepts.
POLICY: Any = OldestFirst

# Bad values of any argument that takes a size.
WRONG_SIZES: list[tuple[Any, str]] = [
    (NAN, "nan is not a size"),
    (float("inf"), "inf is not a size"),
    (-1, "-1 is less than one byte"),
    (0.5, "0.5 is less than one byte"),
    ("0", "'0' is less than one byte"),
    ("4GBB", "'4GBB' is not a size; write one like 512MB"),
    ("9" * 5000, "is more than a 64-bit number of bytes"),
    (HUGE, "an integer of 16610 bits is more than a 64-bit number"),
    (True, "must be a number of bytes or a text such as '4GB', got True"),
    ([4], "or a text such as '4GB', got a value of type list"),
]
WRONG_MODELS: list[tuple[Any, str]] = [
    ("mlx-community/x", r"mlx_lm.load\(path_or_repo\)\[0\], got 'mlx-community/x'"),
    (None, "got None"),
    (PagedCacheFactory, "got the class PagedCacheFactory"),
    (mx.array([1.0]), "got a value of type array"),
    (("model", "tokenizer"), r"tuple: load\(\) returns a model and its tokenizer"),
]
WRONG_FORMATS: list[tuple[Any, str]] = [
    (4, "'auto' or a RequantisationPolicy, got 4"),
    (None, "or a RequantisationPolicy, got None"),
    (OldestFirst, "or a RequantisationPolicy, got the class OldestFirst"),
    (("q8",), r"\('q8',\) is no page format: there are 'fp16', 'q8'"),
    (("q8", 4), "no page format"),
    (("q8", ["q4"]), "no page format"),
    ("q3", "'q3' is no page format"),
    (POLICY(watermark="all"), r"watermark must lie in \(0, 1\], got 'all'"),
    (OldestFirst(page_formats=()), "a tuple of formats such as .*, got an empty tuple"),
    (POLICY(page_formats="q8"), "a tuple of formats such as .*, got 'q8'"),
    (OldestFirst(page_formats=("q4", "q8")), "each be smaller than the one before"),
]
WRONG_PATHS: list[tuple[Any, str]] = [
    (4, "must be a path, got 4"),
    ("", "must be a path, got ''"),
    ("a\0b", "must be a path"),
]
WRONG_COUNTS: list[tuple[Any, str]] = [
    ("5", "must be an integer from . on, got '5'"),
    (1.5, "must be an integer from . on, got 1.5"),
    (NAN, "must be an integer from . on, got nan"),
    (True, "must be an integer from . on, got True"),
    ([1], "must be an integer from . on, got a value of type list"),
    (-1, "must be an integer from . on, got -1"),
]
WRONG_TOKENS: list[tuple[Any, str]] = [
    ("text", r"token ids, got 'text': tokenizer.encode\(text\) gives"),
    (b"text", "a list of token ids, got a value of type bytes"),
    (None, "a list of token ids, got None"),
    (7, "a list of token ids, got 7"),
    ({1: 2}, "a list of token ids, got a value of type dict"),
    ([1, "2"], "must be integers, got '2' at position 1"),
    ([1, 2.0], "must be integers, got 2.0 at position 1"),
    ([True], "must be integers, got True at position 0"),
    ([0, 1 << 63], "signed 64-bit token ids, got 9223372036854775808 at position 1"),
    ([-HUGE], "signed 64-bit token ids, got an integer of 16610 bits at position 0"),
    (mx.array([[1, 2]]), r"one dimension, got an array of shape \(1, 2\): give the prompts one by"),
    (np.array(7), r"one dimension, got an array of shape \(\)"),
    (mx.array([1.5]), "must be integers, got 1.5"),
]


def named(argument: str, wrong: list[tuple[Any, str]]) -> list[Any]:
    return [pytest.param(argument, *each, id=f"{argument}-{n}") for n, each in enumerate(wrong)]


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("qwen3")


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        *named("model", WRONG_MODELS),
        *named("page_format", WRONG_FORMATS),
        *named("max_bytes", WRONG_SIZES),
        *named("write_chunk", WRONG_COUNTS),
        *named("trace", WRONG_PATHS),
        *named("store", WRONG_PATHS),
        *named("store_bytes", WRONG_SIZES),
    ],
)
def test_of_a_factory(model: Any, argument: str, value: Any, message: str, tmp_path: Path) -> None:
    arguments = {"model": model, "store": tmp_path / "store", argument: value}
    with pytest.raises((TypeError, ValueError), match=message) as error:
        PagedCacheFactory(**arguments)
    assert "no page format" in message or argument in str(error.value) or "watermark" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("4GB", 4_000_000_000), (4e9, 4_000_000_000), (1.5, 1), (np.int64(7), 7), ("1.5GiB", 3 << 29)],
)
def test_sizes_are_numbers_or_text(model: Any, size: Any, nbytes: int) -> None:
    assert PagedCacheFactory(model, max_bytes=size).stats().bytes_budget == nbytes
    assert PagePool(1, max_bytes=size).budget.max_bytes == nbytes


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        *named("num_layers", WRONG_COUNTS),
        *named("windows", [
            ([1], "must map layers to Windows, got a value of type list"),
            ({0: 300}, "must map layers to Windows, got 300"),
            ({2: Window(300, 1)}, "of a pool of 2 layers, which count from 0, got 2"),
            ({"0": Window(300, 1)}, "of a pool of 2 layers, which count from 0, got '0'"),
        ]),
        *named("page_format", WRONG_FORMATS),
        *named("max_bytes", WRONG_SIZES),
        *named("beside", [("pool", "must be a PagePool, got 'pool'")]),
        *named("trace", WRONG_PATHS),
    ],
)  # fmt: skip
def test_of_a_pool(argument: str, value: Any, message: str) -> None:
    arguments = {"num_layers": 2, argument: value}
    with pytest.raises((TypeError, ValueError), match=message):
        PagePool(**arguments)


def test_of_sequences_and_caches() -> None:
    pool = PagePool(2, max_bytes=1000)
    with pytest.raises(ValueError, match="give one of the two"):
        PagePool(2, max_bytes=1000, beside=pool)
    wrong: list[tuple[Callable[[Any], Any], Any, str]] = [
        (Sequence, "pool", "pool must be a PagePool, got 'pool'"),
        (lambda value: Sequence(pool, value), "q8", "must be a PageFormat, got 'q8'"),
        (lambda value: PagedKVCache(value, 0, []), None, "pool must be a PagePool, got None"),
        (lambda value: PagedKVCache(pool, value, []), 2, "one of the pool's 2, which .* got 2"),
        (lambda value: PagedKVCache(pool, 0, value), [1], "must be Sequences"),
        (
            lambda value: PagedKVCache(pool, 0, [value]),
            Sequence(PagePool(1, max_bytes=1000)),
            "of the same pool",
        ),
        (lambda value: OldestFirst(recent=value), -1, "recent must be .* from 0 on, got -1"),
        (lambda value: OldestFirst(recent=value), True, "recent must be .* from 0 on, got True"),
        (lambda value: OldestFirst(last_resort=value), NAN, r"lie in \(0, 1\], got nan"),
        (lambda value: OldestFirst(last_resort=value), "1", r"lie in \(0, 1\], got '1'"),
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


TAKES_TOKENS = ("fetch_cache", "insert_cache", "pin", "unpin")


@pytest.mark.parametrize("method", TAKES_TOKENS)
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [*named("tokens", WRONG_TOKENS), *named("salt", [([1], "salt must be hashable, such as")])],
)
def test_of_what_takes_tokens(
    used: tuple[PagedCacheFactory, list[Any]],
    method: str,
    argument: str,
    value: Any,
    message: str,
) -> None:
    factory, cache = used
    before = factory.stats(), len(factory.prefixes)
    arguments = {"tokens": PROMPT, argument: value}
    if method == "insert_cache":
        arguments["prompt_cache"] = cache
    with pytest.raises((TypeError, ValueError), match=message):
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
        ("cache", "must be a list of caches, got 'cache'"),
        (None, "must be a list of caches, got None"),
        ([], "3 caches of this model, 3 of them paged, got 0 and 0: make_cache"),
        (cache[:2], "3 of them paged, got 2 and 2"),
        ([1, 2, 3], "3 of them paged, got 3 and 0"),
        (stock_make_prompt_cache(model), "3 of them paged, got 3 and 0"),
        (PagedCacheFactory(model).make_cache(), "holds pages of another factory, or was made with"),
        (factory.make_cache(64), "or was made with max_kv_size: insert what"),
        (batch, "must hold one sequence, got one of 2: extract"),
    ]
    before = len(factory.prefixes)
    for value, message in wrong:
        with pytest.raises((TypeError, ValueError), match=f"prompt_cache .*{message}"):
            factory.insert_cache(PROMPT, value)
    assert len(factory.prefixes) == before


@pytest.mark.parametrize(("value", "message"), WRONG_COUNTS)
def test_of_counts(model: Any, value: Any, message: str) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    with pytest.raises((TypeError, ValueError), match=f"tokens {message}"):
        factory.can_admit(value)
    with pytest.raises((TypeError, ValueError), match=f"tokens {message}"):
        factory.pool.can_admit(value)
    with pytest.raises((TypeError, ValueError), match=f"max_kv_size {message}"):
        factory.make_cache(value)
    assert not factory.can_admit(HUGE)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        *named("model", WRONG_MODELS),
        *named("tokenizer", [(None, r"load\(path_or_repo\)\[1\], got None"), ("x", "got 'x'")]),
        *named("prompt", [*WRONG_TOKENS[1:], ("", "is empty"), ([], "is empty")]),
        *named("n", [*WRONG_COUNTS, (0, "must be an integer from 1 on, got 0")]),
        *named("prefill_step_size", [*WRONG_COUNTS, (0, "from 1 on, got 0")]),
        *named("max_tokens", [*WRONG_COUNTS[:4], (0, "from 1 on, got 0"), ([5, 0], "got 0")]),
        *named("prompt_cache", [([], "3 caches, .* got 0"), ("x", "a list of caches, got 'x'")]),
        *named("max_token", [(5, "no max_token: mlx-lm's batch_generate takes .*max_tokens")]),
        *named("prompt_caches", [([], "no prompt_caches")]),
    ],
)
def test_of_samples(trained: Any, model: Any, argument: str, value: Any, message: str) -> None:
    cache = PagedCacheFactory(model, max_bytes=1 << 24).make_cache()
    tokenizer = trained("stdlib-llama")[1]
    arguments = {
        "model": model, "tokenizer": tokenizer, "prompt": [1, 2], "n": 2, "prompt_cache": cache,
        argument: value,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=message):
        generate_samples(**arguments)
    assert cache[0].offset == 0


def test_a_trace_overwrites_nothing(model: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes.txt exists, .* remove it, or name"):
        PagedCacheFactory(model, trace=notes)
    assert notes.read_text() == "mine"
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "a" / "b", FileNotFoundError)):
        with pytest.raises(kind, match=r"no trace can be written to .*: name a file in a folder"):
            PagedCacheFactory(model, trace=path)
    empty = tmp_path / "empty"
    empty.touch()
    PagedCacheFactory(model, trace=empty)
    assert empty.read_text().startswith('{"paged_kv_trace"')
    PagedCacheFactory(model, trace=os.devnull)
