"""A head reads short steps as it reads a long one, whatever was trimmed, padded or forked."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PoolExhausted
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.heads.model_head import ModelHead, heads
from tests.support.heads import random_head
from tests.support.zoo import small_model

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(400)]
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 2e-4}


def factory_and_head(
    name: str = "llama", max_bytes: int = 64 << 20
) -> tuple[Any, PagedCacheFactory, ModelHead]:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=max_bytes, head=random_head(model))
    factory.make_cache()
    head = heads.get(factory.pool)
    assert head is not None
    return model, factory, head


def at_once(model: Any, factory: PagedCacheFactory, tokens: list[int]) -> PagedKVCache:
    """The cache of the head's layer that has read all of these in one step."""
    cache = factory.make_cache()
    model(mx.array([tokens]), cache=cache)
    own: PagedKVCache = cache[-1]
    return own


def cache_of(model: Any, factory: PagedCacheFactory, *chunks: list[int]) -> list[Any]:
    """A cache of steps that read these."""
    cache = factory.make_cache()
    for chunk in chunks:
        model(mx.array([chunk]), cache=cache)
    return cache


def one_by_one(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def assert_same_drafts(head: ModelHead, *rows: Any, last: Sequence[int] = (7,)) -> None:
    """Of other sequences that have the same texts."""
    first, second = [head.draft(each, list(last), 4).tolist() for each in rows]
    assert first == second


def is_read(own: PagedKVCache, model: Any, factory: PagedCacheFactory, tokens: list[int]) -> bool:
    """Whether the head's keys are those of a head that has read these tokens at once."""
    expected = at_once(model, factory, tokens).keys
    return own.keys.shape == expected.shape and bool(mx.allclose(own.keys, expected, **CLOSE))


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("gemma3_text", 250),
        pytest.param("qwen3_next", 40, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 255, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_steps_of_one_token_are_read_as_one_long_step(name: str, length: int) -> None:
    model, factory, head = factory_and_head(name)
    cache = cache_of(model, factory, PROMPT[:length], *one_by_one(PROMPT[length : length + 40]))
    own, expected = cache[-1], at_once(model, factory, PROMPT[: length + 40])
    assert_same_drafts(head, own.sequences, expected.sequences)
    assert is_read(own, model, factory, PROMPT[: length + 40])
    assert {each.offset for each in cache if isinstance(each, PagedKVCache)} == {length + 40}
    factory.pool.check()


def test_tokens_in_the_place_of_trimmed_ones_are_read() -> None:
    model, factory, head = factory_and_head()
    cache = cache_of(model, factory, PROMPT[:50], PROMPT[50:60])
    for each in cache:
        each.trim(4)
    for token in PROMPT[70:73]:
        model(mx.array([[token]]), cache=cache)
    text = [*PROMPT[:56], *PROMPT[70:73]]
    assert_same_drafts(head, cache[-1].sequences, at_once(model, factory, text).sequences)
    assert is_read(cache[-1], model, factory, text)


@pytest.mark.parametrize("count", [12, 40])
def test_padding_is_not_read(count: int) -> None:
    """On the left of one row, and on the right of the other, in a short step and in a long one."""
    model, factory, _ = factory_and_head()
    caches = zip(factory.make_cache(), factory.make_cache(), strict=True)
    batch = [layers[0].merge(list(layers)) for layers in caches]
    for layer in batch:
        layer.prepare(left_padding=[3, 0])
        layer.prepare(lengths=[count - 3, count - 5], right_padding=[0, 5])
    texts = [PROMPT[: count - 3], PROMPT[20 : 15 + count]]
    model(mx.array([[0] * 3 + texts[0], texts[1] + [0] * 5]), cache=batch)
    for layer in batch:
        layer.finalize()
    for at in range(30):
        model(mx.array([[PROMPT[at]], [PROMPT[at + 5]]]), cache=batch)
    for row, text in enumerate(texts):
        text += PROMPT[5 * row : 5 * row + 30]
        assert is_read(batch[-1].extract(row), model, factory, text)


def test_drafts_that_find_no_memory_change_nothing() -> None:
    """A page that others share needs a copy; the fork does not take later tokens."""
    model, factory, head = factory_and_head(max_bytes=4 << 20)
    cache = cache_of(model, factory, PROMPT[:50], PROMPT[50:60])
    fork = [each.extract(0) for each in cache]
    held: list[Any] = []
    while factory.can_admit(1):
        held.append(cache_of(model, factory, PROMPT[:1]))
    with pytest.raises(PoolExhausted):
        head.draft(fork[-1].sequences, [7], 4)
    assert {each.offset for each in fork} == {60}
    held.clear()
    model(mx.array([PROMPT[70:75]]), cache=cache)
    expected = at_once(model, factory, PROMPT[:60])
    assert_same_drafts(head, fork[-1].sequences, expected.sequences)
    assert is_read(fork[-1], model, factory, PROMPT[:60])


@pytest.mark.slow
def test_a_head_reads_steps_that_repeat_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    model = small_model("qwen3_next")
    drafts, logits = [], []
    for compile in (False, True):
        factory = PagedCacheFactory(
            model, max_bytes=64 << 20, head=random_head(model, "eagle3"), compile=compile
        )
        cache = factory.make_cache()
        head = heads.get(factory.pool)
        assert head is not None
        model(mx.array([PROMPT[:245]]), cache=cache)
        for at in range(245, 270):
            logits.append(model(mx.array([PROMPT[at : at + 1]]), cache=cache))
            mx.eval(logits[-1])
        drafts.append(head.draft(cache[-1].sequences, [7], 4).tolist())
        assert {each.offset for each in cache if isinstance(each, PagedKVCache)} == {270}
        if compile:
            assert factory.recordings[factory.pool].repeated > 15
    assert drafts[0] == drafts[1]
    for python, repeated in zip(logits[:25], logits[25:], strict=True):
        assert mx.allclose(python, repeated, **CLOSE)


def test_rows_keep_other_numbers_of_tokens() -> None:
    """In a batch whose rows came at other times, after trims of each row."""
    model, factory, head = factory_and_head()
    caches = []
    for row, taken in enumerate((1, 5, 9)):
        later = one_by_one(PROMPT[row + 50 : row + 50 + taken])
        caches.append(cache_of(model, factory, PROMPT[row : row + 50], *later))
    batch = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    model(mx.array([PROMPT[row + 60 : row + 64] for row in range(3)]), cache=batch)
    for layer in batch:
        layer.trim_per_sequence([3, 0, 2])
    lengths = [(1, 1), (5, 4), (9, 2)]
    texts = [
        [*PROMPT[row : row + 50 + taken], *PROMPT[row + 60 : row + 60 + kept]]
        for row, (taken, kept) in enumerate(lengths)
    ]
    expected = [at_once(model, factory, text).sequences[0] for text in texts]
    own = batch[-1].sequences
    for order in ([0, 1, 2], [2, 0]):
        drafts = [
            head.draft([rows[row] for row in order], [7 + row for row in order], 4).tolist()
            for rows in (own, expected)
        ]
        assert drafts[0] == drafts[1]
    for row, text in enumerate(texts):
        assert is_read(batch[-1].extract(row), model, factory, text)
