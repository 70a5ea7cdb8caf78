"""Heads of 512 numbers, whose columns simdgroups share, in the GPU kernels on this CPU with every
access checked, against float64."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.gpu.backend import HEAD_SIZES
from paged_kv.kernels.pages import prefix_groups as groups_module
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FormatName
from paged_kv.kernels.plain.plain_backend import PlainBackend
from tests.support.arrays import normal, numbers
from tests.support.gpu_pages import (
    ALL_DIALECTS,
    DIALECTS,
    SHARED,
    STRIDE,
    TOLERANCES,
    Separately,
    backend_on,
    device_of,
    needs_compiler,
    new_pages,
    same,
    written,
)
from tests.support.gpu_prefixes import ORDERS, batch_of, names, tables_behind
from tests.support.grids import plain_cases, plain_only

FORMATS: list[FormatName] = ["fp16", "q8", "q4", ("q8", "q4"), ("q4", "fp16")]
TOLERANCE = TOLERANCES[mx.float16]
in_dialects = pytest.mark.parametrize("dialect", ALL_DIALECTS)
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def groups_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "LEAST_SAVED", 1)


def wide(dtype: mx.Dtype = mx.float16) -> LayerGeometry:
    return same(512, dtype, heads=1)


@needs_compiler
@in_dialects
@pytest.mark.parametrize("dtype", plain_only([mx.float16], TOLERANCES))
@pytest.mark.parametrize(
    ("name", "queries"),
    plain_cases([("fp16", 3), ("q4", 1)], product(FORMATS, (1, 3))),
)
def test_rows_that_end_at_the_edges_of_pages(
    dialect: str, name: FormatName, queries: int, dtype: mx.Dtype
) -> None:
    backend = backend_on(device_of(dialect), dialect)
    assert backend.supports(wide(dtype))
    batch = written(backend, wide(dtype), [name], [257, 9, 0])
    assert batch.attend(queries, gqa_group_size=8) <= TOLERANCES[dtype]


@needs_compiler
@in_dialects
@slow
@pytest.mark.parametrize("gqa_group_size", [1, 4, 7, 20])
def test_any_number_of_query_heads_to_two_kv_heads(dialect: str, gqa_group_size: int) -> None:
    """In pages of all formats, so that a threadgroup of decode has queries in both bases."""
    backend = backend_on(device_of(dialect, *ORDERS), dialect)
    batch = written(backend, same(512), ["q4", "fp16", ("q8", "q4")], [40, 530])
    for queries in (1, 3):
        assert batch.attend(queries, gqa_group_size=gqa_group_size) <= TOLERANCE


@needs_compiler
@in_dialects
@slow
@pytest.mark.parametrize("formats", [["fp16"], ["fp16", "q4"]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"with_sinks": True, "window": 33},
        {"softcap": 0.5},
        {"causal": False},
        {"new_tokens": 40, "with_sinks": True},
        {"new_tokens": 270, "window": 200, "softcap": 0.5},
    ],
    ids=str,
)
def test_options_of_attention(
    dialect: str, formats: Sequence[FormatName], options: dict[str, Any]
) -> None:
    backend = backend_on(device_of(dialect), dialect)
    padding = [0, 0 if "new_tokens" in options else 3]
    batch = written(backend, wide(), formats, [300, 12], right_padding=padding)
    for queries in (1, 9):
        assert batch.attend(queries, gqa_group_size=2, **options) <= TOLERANCE


@needs_compiler
@in_dialects
@slow
@pytest.mark.parametrize("formats", [["fp16"], ["q8"], ["q4", "fp16"]], ids=str)
@pytest.mark.parametrize("gqa_group_size", [1, 8])
def test_a_step_that_is_written_too(
    dialect: str,
    formats: Sequence[FormatName],
    gqa_group_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In contexts of several parts."""
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(tuning.LEAST_TOKENS, 16))
    backend = backend_on(device_of(dialect, *ORDERS), dialect)
    options: Any = {"gqa_group_size": gqa_group_size, "with_sinks": True}
    batch, other = (written(backend, wide(), formats, [300, 40], more=True) for _ in range(2))
    assert batch.write_and_attend(backend, **options) <= TOLERANCE
    other.write_and_attend(Separately(backend), **options)
    assert batch.bytes() == other.bytes()


@needs_compiler
@in_dialects
@slow
@pytest.mark.parametrize("formats", [["fp16"], ["q8"], ["q4"], ["fp16", "q4"]], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_sequences_behind_a_shared_prefix(
    dialect: str, formats: Sequence[FormatName], queries: int
) -> None:
    device = device_of(dialect, *ORDERS)
    tables = tables_behind(1, [1, 1, 0, 1], len(formats))
    batch = batch_of(device, dialect, tables, [1, 40, 256, 9], formats, wide())
    assert batch.attend(queries, gqa_group_size=8, with_sinks=True) <= TOLERANCE
    assert names(device) == ["groups", "decode" if queries == 1 else "prefill", "merge"]


@needs_compiler
@in_dialects
@slow
def test_queries_that_leave_no_room_for_two_sequences(dialect: str) -> None:
    """A threadgroup has 64 query rows."""
    device = device_of(dialect, checked=False)
    batch = batch_of(device, dialect, tables_behind(1, [1, 1]), [20, 3], geometry=wide())
    assert batch.attend(5, gqa_group_size=8) <= TOLERANCE
    assert names(device) == ["prefill"]


@needs_compiler
@in_dialects
@slow
@pytest.mark.parametrize("name", FORMATS)
def test_gathered_and_recoded_pages_are_those_of_plain_operations(
    dialect: str, name: FormatName
) -> None:
    """Of numbers that are rotated in another order of sums, so a code may be the next one."""
    backend = backend_on(device_of(dialect, *ORDERS), dialect)
    keys, values = (normal((1, 1, 270, 512), mx.float16, seed) for seed in (1, 2))
    found = []
    for each in (backend, PlainBackend()):
        pages = new_pages(each, wide(), ["fp16", name])
        pages.write(keys, values, AttentionMetadata(((2, 0),), (270,), (0,)))
        pages.copy({2: STRIDE + 1})
        held = AttentionMetadata(((STRIDE + 1, 0),), (270,), (0,))
        found.append((pages, pages.gather(held)))
    (ours, gathered), (theirs, expected) = found
    other = np.array(ours.page(STRIDE + 1)) != np.array(theirs.page(STRIDE + 1))
    assert other.mean() <= (0 if name == "fp16" else 1e-3)
    plain = LayerPages(wide(), PlainBackend(), STRIDE)
    plain.slabs = ours.slabs
    for one, same_pages, other_pages in zip(gathered, plain.gather(held), expected, strict=True):
        assert np.allclose(numbers(one), numbers(same_pages), rtol=2e-3, atol=2e-3)
        assert np.allclose(numbers(one), numbers(other_pages), atol=0.3)


def _decodes() -> Iterator[tuple[tuple[int, int], int, int]]:
    dims = [*product(HEAD_SIZES, HEAD_SIZES), (512, 512)]
    yield from product(dims, (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 64), (1, 2))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_threadgroup_of_decode_has_the_memory_that_it_may(dialect: str) -> None:
    """Queries in each basis, and for each simdgroup a tile's weights or a head's values."""
    for (k_dim, v_dim), gqa_group_size, bases in _decodes():
        shape = tuning.decode_shape(
            dialect, 1, gqa_group_size, 1, (k_dim, v_dim), 1000, bases=bases
        )
        own = max(tuning.TILE * shape.rows, v_dim) + shape.rows * 2
        queries = shape.blocks * shape.rows * k_dim * bases
        assert 4 * (shape.blocks * shape.parts * own + queries) <= SHARED["metal"]
        assert shape.rows * -(-v_dim // tuning.LANES) <= tuning.MOST_SUMS


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_heads_of_512_share_columns(dialect: str) -> None:
    sharers = {dim: tuning.column_sharers(dialect, dim) for dim in (*HEAD_SIZES, 512)}
    assert sharers == {**dict.fromkeys(HEAD_SIZES, 1), 512: 2}
    assert tuning.group_threads(dialect, 512, 512) == tuning.prefill_threads(dialect, 512)
    threads = tuning.prefill_threads(dialect, 512)
    assert tuning.matrix_rows(dialect, threads, 2) == tuning.GROUP_ROWS
