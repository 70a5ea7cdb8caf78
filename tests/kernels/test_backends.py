"""What each backend writes, gathers and copies, on each instruction set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry
from tests.support.arrays import normal
from tests.support.attention_metadata import unpadded
from tests.support.backends import BACKENDS, backend_named

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

Words = npt.NDArray[np.uint16]

SLAB_PAGES = (3, 5, 8)
STRIDE = 8
ENTRIES = [slab * STRIDE + page for slab, pages in enumerate(SLAB_PAGES) for page in range(pages)]
NAN_WORD = 0x7FC0  # A NaN in float16, in bfloat16 and, twice, in float32.


def same(heads: int, k_dim: int, v_dim: int, dtype: mx.Dtype = mx.float32) -> LayerGeometry:
    return LayerGeometry(heads, k_dim, dtype, heads, v_dim, dtype)


def words(array: mx.array) -> Words:
    return np.asarray(array.view(WORD))


def addresses(pages: LayerPages) -> dict[int, int]:
    """The address of each slab, after its writes."""
    return {slab: np.asarray(each.memory).ctypes.data for slab, each in pages.slabs.items()}


def new_pages(backend: str, geometry: LayerGeometry) -> LayerPages:
    """Three slabs full of NaN, like freed pages."""
    pages = LayerPages(geometry, backend_named(backend, geometry), STRIDE)
    for slab, count in enumerate(SLAB_PAGES):
        pages.map_slab(slab, count, FP16)
    nans = mx.full(pages.page(0).shape, NAN_WORD, dtype=WORD)
    pages.load(dict.fromkeys(ENTRIES, nans))
    return pages


def new_tables(lengths: Sequence[int], seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Block tables for sequences of those lengths, with pages in any order and any slab."""
    free = [int(entry) for entry in np.random.default_rng(seed).permutation(ENTRIES)]
    return tuple(tuple(free.pop() for _ in range(-(-length // PAGE_SIZE))) for length in lengths)


@dataclass
class Batch:
    """Pages, and the keys and values of each sequence: [heads, tokens, dim]."""

    pages: LayerPages
    metadata: AttentionMetadata
    keys: list[mx.array]
    values: list[mx.array]


def written(
    backend: str, geometry: LayerGeometry, lengths: Sequence[int], *, joint: int = 0
) -> Batch:
    """Sequences of those lengths. Each was written alone, except for `joint` final steps of one
    token each, which the whole batch took together."""
    pages, tables = new_pages(backend, geometry), new_tables(lengths)
    k_shapes = [(geometry.k_heads, length, geometry.k_dim) for length in lengths]
    v_shapes = [(geometry.v_heads, length, geometry.v_dim) for length in lengths]
    keys = [normal(shape, geometry.k_dtype, 10 + row) for row, shape in enumerate(k_shapes)]
    values = [normal(shape, geometry.v_dtype, 20 + row) for row, shape in enumerate(v_shapes)]
    for table, k, v, length in zip(tables, keys, values, lengths, strict=True):
        alone = length - joint
        if alone:
            pages.write(k[None, :, :alone], v[None, :, :alone], unpadded((table,), (alone,)))
    for left in range(joint, 0, -1):
        ends = tuple(length - left + 1 for length in lengths)
        step_keys = mx.stack([k[:, end - 1 : end] for k, end in zip(keys, ends, strict=True)])
        step_values = mx.stack([v[:, end - 1 : end] for v, end in zip(values, ends, strict=True)])
        pages.write(step_keys, step_values, unpadded(tables, ends))
    return Batch(pages, unpadded(tables, tuple(lengths)), keys, values)


WRITES = [((0, 0), 1), ((0, 256), 256), ((255, 700), 2), ((100, 13), 600), ((256, 511), 257)]
MIXED = LayerGeometry(3, 24, mx.float32, 2, 40, mx.float16)
MIXED_DTYPES = LayerGeometry(2, 24, mx.float32, 2, 40, mx.bfloat16)


@pytest.mark.parametrize("geometry", [same(2, 192, 128, mx.float16), MIXED, MIXED_DTYPES])
@pytest.mark.parametrize(("starts", "count"), WRITES)
@pytest.mark.slow
def test_a_write_changes_its_slots_and_nothing_else(
    backend: str, geometry: LayerGeometry, starts: tuple[int, int], count: int
) -> None:
    pages = new_pages(backend, geometry)
    rng = np.random.default_rng(count)
    memory = {
        entry: rng.integers(0, 1 << 16, pages.layout_of(0).page_words, dtype=np.uint16)
        for entry in ENTRIES
    }
    shape = pages.page(0).shape
    pages.load({entry: mx.array(page).reshape(shape) for entry, page in memory.items()})
    keys = normal((2, geometry.k_heads, count, geometry.k_dim), geometry.k_dtype, seed=1)
    values = normal((2, geometry.v_heads, count, geometry.v_dim), geometry.v_dtype, seed=2)
    ends = tuple(start + count for start in starts)
    tables = new_tables(ends, seed=count)
    pages.write(keys, values, unpadded(tables, ends))

    key_words = geometry.k_heads * PAGE_SIZE * geometry.k_dim * geometry.k_dtype.size // 2
    for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
        for token in range(count):
            page = memory[table[(start + token) // PAGE_SIZE]]
            at = (start + token) % PAGE_SIZE
            for plane, new in ((page[:key_words], keys), (page[key_words:], values)):
                plane.reshape(new.shape[1], PAGE_SIZE, -1)[:, at] = words(new[row, :, token])
    for entry in ENTRIES:
        assert (np.asarray(pages.page(entry)).reshape(-1) == memory[entry]).all()


@pytest.mark.parametrize("geometry", [same(2, 64, 64, mx.bfloat16), MIXED, MIXED_DTYPES])
@pytest.mark.parametrize("lengths", [(513,), (257, 256, 3), (5, 0, 600), (0,)])
def test_gather_gives_what_was_written_and_zeros_before_shorter_rows(
    backend: str, geometry: LayerGeometry, lengths: tuple[int, ...]
) -> None:
    batch = written(backend, geometry, lengths)
    gathered = batch.pages.gather(batch.metadata)
    for found, rows in zip(gathered, (batch.keys, batch.values), strict=True):
        heads, _, dim = rows[0].shape
        assert found.shape == (len(lengths), heads, max(lengths), dim)
        assert found.dtype == rows[0].dtype
        for found_row, row, length in zip(found, rows, lengths, strict=True):
            before = max(lengths) - length
            assert (words(found_row[:, before:]) == words(row)).all()
            assert (words(found_row[:, :before]) == 0).all()


def test_a_run_of_pages_ends_with_its_slab(backend: str) -> None:
    """The last entry of a slab with as many pages as the stride, and the first entry of the next
    slab, are adjacent only as numbers."""
    geometry = same(2, 32, 32)
    pages = LayerPages(geometry, backend_named(backend, geometry), slab_stride=2)
    for slab in range(2):
        pages.map_slab(slab, 2, FP16)
    keys = normal((1, 2, 800, 32), mx.float32, seed=1)
    metadata = unpadded(((0, 1, 2, 3),), (800,))
    pages.write(keys, keys + 1, metadata)
    found_keys, found_values = pages.gather(metadata)
    assert mx.array_equal(found_keys, keys)
    assert mx.array_equal(found_values, keys + 1)


def test_values_without_numbers_take_no_room(backend: str) -> None:
    """Latent attention keeps everything in its keys."""
    batch = written(backend, LayerGeometry(1, 72, mx.float16, 1, 0, mx.float16), [300, 20], joint=2)
    keys, values = batch.pages.gather(batch.metadata)
    assert (words(keys[0]) == words(batch.keys[0])).all()
    assert values.shape == (2, 1, 300, 0)


def test_a_row_that_takes_over_pages_sees_only_its_own_tokens(backend: str) -> None:
    """An earlier, longer write left NaN in these pages."""
    batch, alone = written(backend, same(2, 32, 32), [600]), new_pages(backend, same(2, 32, 32))
    nans = mx.full((1, 2, 600, 32), mx.nan)
    batch.pages.write(nans, nans, batch.metadata)
    metadata = unpadded((batch.metadata.block_tables[0][::-1],), (300,))
    step = normal((1, 2, 300, 32), mx.float32, 1), normal((1, 2, 300, 32), mx.float32, 2)
    for pages in (batch.pages, alone):
        pages.write(*step, metadata)
    for queries in (1, 300):
        asked = normal((1, 4, queries, 32), mx.float32, 3)
        found, expected = (
            pages.attend(asked, metadata, Attention(0.2)) for pages in (batch.pages, alone)
        )
        assert mx.array_equal(found, expected)


def test_copies_are_exact_and_leave_every_other_page_alone(backend: str) -> None:
    pages = written(backend, same(2, 32, 48), [700, 700]).pages
    before = {entry: np.array(pages.page(entry)) for entry in ENTRIES}
    at = addresses(pages)
    copies = {0: 2, 9: 23, 17: 8}  # Within a slab, up and down.
    pages.copy(copies)
    expected = {**before, **{target: before[source] for source, target in copies.items()}}
    for entry in ENTRIES:
        assert (np.asarray(pages.page(entry)) == expected[entry]).all()
    assert addresses(pages) == at


def test_loaded_pages_are_what_was_given_and_gather_as_tokens(backend: str) -> None:
    source = written(backend, same(2, 32, 32), [600])
    table = source.metadata.block_tables[0]
    target = new_pages(backend, same(2, 32, 32))
    at = addresses(target)
    entries = (19, 1, 10)
    saved = [source.pages.page(entry) + 0 for entry in table]
    target.load(dict(zip(entries, saved, strict=True)))
    for gathered, kept in zip(
        target.gather(unpadded((entries,), (600,))), (source.keys, source.values), strict=True
    ):
        assert mx.array_equal(gathered[0], kept[0])
    for entry in set(ENTRIES) - set(entries):
        assert (np.asarray(target.page(entry)) == NAN_WORD).all()
    assert addresses(target) == at


def test_a_page_is_a_view_and_a_slab_gives_its_memory_back(backend: str) -> None:
    pages = new_pages(backend, same(4, 128, 128))
    before, page_bytes = mx.get_active_memory(), pages.page_bytes(FP16)
    views = {entry: pages.page(entry) for entry in ENTRIES}
    mx.eval(views)
    assert mx.get_active_memory() - before < page_bytes
    for entry, view in views.items():
        slab, page = divmod(entry, STRIDE)
        assert np.asarray(view).ctypes.data == addresses(pages)[slab] + page * page_bytes
        assert view.nbytes == page_bytes
    del views, view
    before = mx.get_active_memory()
    pages.unmap_slab(1)
    pages.unmap_slab(1)
    assert before - mx.get_active_memory() >= SLAB_PAGES[1] * page_bytes
    assert set(pages.slabs) == {0, 2}


@pytest.mark.parametrize("own_stream", [False, True])
def test_writes_stay_in_place_while_attention_is_in_flight(backend: str, own_stream: bool) -> None:
    """A read in flight holds the slab, so a write that does not wait for it copies all of it.
    mlx-lm generates in a stream of its own."""
    pages = new_pages(backend, same(4, 128, 128))
    at = addresses(pages)
    step = normal((1, 4, 1, 128), mx.float32, seed=1)
    slow = normal((600, 600), mx.float32, seed=2)
    mx.eval(step, slow)
    start: Callable[[mx.array], None] = mx.async_eval
    device = mx.default_device()
    spikes = []
    with mx.stream(mx.new_stream(device) if own_stream else mx.default_stream(device)):
        for length in range(245, 265):
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            metadata = unpadded(((0, 8, 16),), (length,))
            pages.write(step, step, metadata)
            mx.eval([slab.memory for slab in pages.slabs.values()])
            spikes.append(mx.get_peak_memory() - before)
            queries = step + 0 * (slow @ slow).sum()
            start(pages.attend(queries, metadata, Attention(0.1)))
    assert addresses(pages) == at
    assert max(spikes) < SLAB_PAGES[0] * pages.page_bytes(FP16)
