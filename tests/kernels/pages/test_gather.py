"""Single tokens from pages: what a gather of everything has at the same indices."""

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FormatName, LayerGeometry, page_format_named
from paged_kv.pool.layer_kinds import Window
from paged_kv.steps.recognised_arrays import TokenIndices
from tests.support.arrays import normal
from tests.support.backends import BACKENDS, backend_named
from tests.support.page_numbers import holding

STRIDE, DIM, POSITIONS, CHOSEN = 64, 64, 32, 5
# In two slabs.
TABLES, LENGTHS = ((0, STRIDE), (1,), (STRIDE + 1, 2), (STRIDE + 2,)), (300, 17, 512, 256)


def random_indices(length: int, count: int = 90) -> mx.array:
    below = np.random.default_rng(1).integers(0, length, (len(LENGTHS), count))
    return mx.array(below.astype(np.uint32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "formats", [("fp16", "fp16"), ("q8", "fp16"), (("q4", "q8"), "q4"), ("q4", "q8")]
)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (3, 0, 300, 7)])
def test_tokens_are_those_of_a_gather(
    backend: str, formats: tuple[FormatName, FormatName], heads: int, padding: tuple[int, ...]
) -> None:
    geometry = LayerGeometry(heads, DIM, mx.bfloat16, heads, POSITIONS, mx.bfloat16)
    pages = LayerPages(geometry, backend_named(backend, geometry), STRIDE)
    for slab, name in enumerate(formats):
        pages.map_slab(slab, 3, page_format_named(name))
    metadata = AttentionMetadata(TABLES, LENGTHS, padding)
    shape = (len(TABLES), heads, max(metadata.ends))
    keys, values = (normal((*shape, dim), mx.bfloat16, dim) for dim in (DIM, POSITIONS))
    pages.load(holding(pages, keys, values, metadata))
    indices = random_indices(shape[2])
    at = indices[:, None, :, None]
    for found, everything in zip(
        pages.gather_tokens(metadata, indices), pages.gather(metadata), strict=True
    ):
        assert mx.array_equal(found, mx.take_along_axis(everything, at, axis=2))


@pytest.fixture(params=["plain", "native"])
def cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, hooked: None
) -> PagedKVCache:
    monkeypatch.setenv("PAGED_KV_BACKEND", request.param)
    return filled(PagePool(1, max_bytes=8 << 20, name="test"))


def filled(pool: PagePool) -> PagedKVCache:
    """Two sequences, of 10 tokens and of 7."""
    cache = PagedKVCache(pool, 0, [Sequence(pool), Sequence(pool)])
    cache.prepare(lengths=[10, 7], right_padding=[0, 3])
    mx.eval(append(cache, 10))
    cache.finalize()
    return cache


def append(cache: PagedKVCache, count: int) -> Any:
    shape = (2, 1, count)
    keys, values = normal((*shape, DIM), mx.float32, 3), normal((*shape, POSITIONS), mx.float32, 4)
    return cache.update_and_fetch(keys, values)


def chosen() -> mx.array:
    """Indices [B, 1, CHOSEN, 1] of 11 tokens; of the second sequence, two are padding."""
    return mx.array([[0, 10, 4, 9, 2], [10, 0, 1, 8, 4]], mx.uint32)[:, None, :, None]


def broadcast(dim: int) -> Any:
    return mx.broadcast_to(chosen(), (2, 1, CHOSEN, dim))


def gathers(cache: PagedKVCache) -> int:
    gc.collect()
    return cache.pool.stats().gather_fallbacks


@pytest.mark.parametrize("first", [None, 0, -11])
def test_chosen_tokens_are_read_and_nothing_else(cache: PagedKVCache, first: int | None) -> None:
    """The step's own token too, which no page holds yet. One index may stand for all numbers of a
    token, also one that counts from the end."""

    def indices(dim: int) -> Any:
        return broadcast(dim) if first is None else chosen().astype(mx.int32) + first

    everything = append(filled(PagePool(1, max_bytes=8 << 20)), 1)
    expected = [mx.take_along_axis(mx.array(each), chosen(), axis=2) for each in everything]
    before = gathers(cache)
    found = [mx.take_along_axis(each, indices(each.shape[3]), axis=2) for each in append(cache, 1)]
    assert all(map(mx.array_equal, found, expected))
    assert gathers(cache) == before


def test_tokens_stay_what_they_were_when_they_were_chosen(cache: PagedKVCache) -> None:
    keys, _ = append(cache, 1)
    expected = mx.array(keys)[:, :, 10:]
    mx.eval(expected)
    latest = mx.broadcast_to(mx.full((2, 1, 1, 1), 10, mx.uint32), (2, 1, 1, DIM))
    found = mx.take_along_axis(keys, latest, axis=2)
    for _ in range(2):  # The second write ends the first one.
        cache.trim(1)
        cache.update_and_fetch(mx.zeros((2, 1, 1, DIM)), mx.zeros((2, 1, 1, POSITIONS)))
    assert mx.array_equal(found, expected)


def changed_indices(keys: mx.array) -> mx.array:
    indices = broadcast(DIM)
    indices[..., 3] = 1
    return mx.take_along_axis(keys, indices, 2)


def changed_keys(keys: mx.array) -> mx.array:
    keys += 1
    return mx.take_along_axis(keys, broadcast(DIM), 2)


def other_indices_for_each_number() -> mx.array:
    numbers = mx.arange(DIM, dtype=mx.uint32)[None, None, None] % 11
    return numbers + mx.zeros((2, 1, 1, 1), mx.uint32)


def signed_indices() -> mx.array:
    return mx.broadcast_to(chosen().astype(mx.int32) - 11, (2, 1, CHOSEN, DIM))


def take(*arguments: Any) -> mx.array:
    return mx.take_along_axis(*arguments)  # as the module's `mx` has it now


CHANGES: dict[str, Any] = {
    "another axis": lambda keys: take(keys, mx.zeros((2, 1, 11, 1), mx.uint32)),
    "other indices for each number": lambda keys: take(keys, other_indices_for_each_number(), 2),
    "signed indices": lambda keys: take(keys, signed_indices(), 2),
    "keys of another dtype": lambda keys: take(keys.astype(mx.float16), broadcast(DIM), 2),
    "keys that were tiled": lambda keys: take(mx.tile(keys, [1, 2, 1, 1]), broadcast(DIM), 2),
    "changed indices": changed_indices,
    "changed keys": changed_keys,
}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_else_takes_from_gathered_numbers(cache: PagedKVCache, name: str) -> None:
    keys, _ = append(cache, 1)
    expected = CHANGES[name](mx.array(keys))
    found = CHANGES[name](keys)
    assert found.shape == expected.shape
    assert mx.array_equal(found, expected)


def test_indices_are_recognised_by_how_they_were_made(cache: PagedKVCache) -> None:
    assert type(broadcast(DIM)) is TokenIndices
    assert type(mx.broadcast_to(chosen().astype(mx.int32), (2, 1, CHOSEN, DIM))) is mx.array
    assert type(mx.broadcast_to(chosen()[0, 0], (2, 1, CHOSEN, DIM))) is mx.array
    assert type(mx.broadcast_to(chosen()[:1], (2, 1, CHOSEN, DIM))) is mx.array
    assert mx.broadcast_to(1.5, (2, 3)).sum() == 9


@pytest.mark.usefixtures("hooked")
def test_a_window_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(PagePool(1, windows={0: Window(8, 8)}, max_bytes=8 << 20))
    keys, _ = append(cache, 1)
    indices = mx.broadcast_to(chosen() % keys.shape[2], (2, 1, CHOSEN, DIM))
    expected = mx.take_along_axis(mx.array(keys), mx.array(indices), axis=2)
    assert mx.array_equal(mx.take_along_axis(keys, indices, axis=2), expected)


@pytest.mark.parametrize("full", ["fp16", "q8"])
def test_tokens_stay_what_they_were_when_others_take_their_place(full: FormatName) -> None:
    pool = PagePool(1, max_bytes=1 << 24, page_format=full)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    for count in (300, 1):
        keys, values = (normal((1, 1, count, DIM), mx.float32, count + at) for at in (0, 5))
        read = cache.update_and_fetch(keys, values)[0].read
    taken = read.gather_tokens(mx.array([[0, 300]]), of_values=False)
    assert taken is not None
    cache.trim(1)
    for step in (keys + 7, keys):  # The second writes the first to its page.
        cache.update_and_fetch(step, values)
    assert mx.array_equal(taken[:, :, 1], keys[:, :, 0])
