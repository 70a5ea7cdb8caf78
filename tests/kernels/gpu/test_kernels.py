"""GPU kernels on this CPU, with every access checked, against dense attention in float64 over the
numbers in the pages, and against the plain backend's bytes."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.pages import number_format
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import KEY_FORMATS, rotate
from paged_kv.kernels.pages.page_format import FormatName, PageLayout
from tests.support.arrays import normal, numbers
from tests.support.examples import examples
from tests.support.gpu_pages import (
    DIALECTS,
    MIXED,
    STRIDE,
    TOLERANCES,
    backend_on,
    device_of,
    needs_compiler,
    new_pages,
    off_centre,
    rarely,
    same,
    step_error,
    written,
)

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.parametrize("dialect", DIALECTS)]

FORMATS: list[FormatName] = ["fp16", "q8", "q4", ("q4", "fp16")]
# With rotation, sums have another order than MLX's: one code or scale in 10,000 may be the next
# one.
OTHER_BYTES = 1e-4


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", mx.float16),
        ("q8", mx.bfloat16),
        ("q4", mx.float16),
        (("q4", "fp16"), mx.float16),
        rarely("fp16", mx.bfloat16),
    ],
)
def test_rows_that_end_at_the_edges_of_pages(
    dialect: str, name: FormatName, dtype: mx.Dtype
) -> None:
    """And steps whose token is the first of a page, its last one, and the first of a sequence."""
    backend = backend_on(device_of(dialect, "shuffled"), dialect)
    lengths = [257, 256, 255, 1, 0]
    batch = written(backend, same(64, dtype), [name], lengths)
    for queries in (1, 9):
        assert batch.attend(queries) <= TOLERANCES[dtype]
    assert step_error(backend, same(64, dtype), [name], lengths) <= TOLERANCES[dtype]


def test_results_do_not_depend_on_the_order_of_threads(dialect: str) -> None:
    backend = backend_on(device_of(dialect, "forward", "reverse", "shuffled"), dialect)
    batch = written(backend, same(64), MIXED, [270, 33])
    for queries in (1, 9):
        assert batch.attend(queries, with_sinks=True) <= TOLERANCES[mx.float16]
    assert step_error(backend, same(64), MIXED, [270, 33], with_sinks=True) <= 4e-3


def test_pages_of_all_formats_take_one_launch(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums have different bases."""
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(DIALECTS, 128))
    device = device_of(dialect)
    error = step_error(backend_on(device, dialect), same(64), MIXED, [600, 33])
    assert error <= TOLERANCES[mx.float16]
    assert not any("merge" in launch.name for launch in device.launches)


@pytest.mark.parametrize("dim", [80, 128, 256, 512, *map(rarely, (64, 96, 192))])
def test_head_sizes(dialect: str, dim: int) -> None:
    """With keys of 192 numbers, values have another size. Simdgroups share columns of 512."""
    backend = backend_on(device_of(dialect), dialect)
    geometry = same(dim, v_dim=128 if dim == 192 else dim, heads=1 if dim == 512 else 2)
    formats: list[FormatName] = ["fp16"] if dim == 80 else ["q4", "fp16"]
    batch = written(backend, geometry, formats, [270])
    for queries in (1, 5):
        assert batch.attend(queries) <= TOLERANCES[mx.float16]
    assert step_error(backend, geometry, formats, [70]) <= TOLERANCES[mx.float16]


@pytest.mark.parametrize("gqa_group_size", [1, 20, rarely(7)])
def test_any_number_of_query_heads_to_a_kv_head(dialect: str, gqa_group_size: int) -> None:
    backend = backend_on(device_of(dialect, "shuffled"), dialect)
    batch = written(backend, same(64), ["fp16"], [40, 300])
    for queries in (1, 3):
        assert batch.attend(queries, gqa_group_size=gqa_group_size) <= TOLERANCES[mx.float16]
    error = step_error(backend, same(64), ["fp16"], [40, 300], gqa_group_size=gqa_group_size)
    assert error <= TOLERANCES[mx.float16]


@pytest.mark.parametrize(
    "options",
    [
        *({"window": window} for window in (1, 2, 31, 32, 250, 256, 5000)),
        {"softcap": 0.5},
        {"softcap": 0.5, "window": 33},
        {"causal": False},
        {"new_tokens": 1},
        {"new_tokens": 40, "window": 33},
        {"new_tokens": 270},
    ],
)
def test_options_of_attention(dialect: str, options: dict[str, Any]) -> None:
    backend = backend_on(device_of(dialect), dialect)
    batch = written(backend, same(64), MIXED, [300, 0 if "new_tokens" in options else 30])
    for queries in {1, min(9, options.get("new_tokens", 9))}:
        assert batch.attend(queries, with_sinks=True, **options) <= TOLERANCES[mx.float16]
    if options.keys() <= {"window", "softcap"}:
        error = step_error(backend, same(64), MIXED, [300, 33, 0, 5], with_sinks=True, **options)
        assert error <= TOLERANCES[mx.float16]


def test_steps_with_padding(dialect: str) -> None:
    """The last sequence's valid tokens come before the step's last three, and the second sequence
    has none."""
    backend = backend_on(device_of(dialect), dialect)
    batch = written(backend, same(64), ["fp16"], [300, 0, 20], right_padding=[0, 5, 3])
    for queries in (1, 5, 40):
        assert batch.attend(queries, with_sinks=True) <= TOLERANCES[mx.float16]


@examples(6)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=2),
    queries=st.sampled_from([1, 3, 40]),
    num_new=st.sampled_from([0, 1, 40, 270]),
    window=st.none() | st.integers(1, 500),
    causal=st.booleans(),
)
def test_pages_of_several_formats_in_one_table(
    dialect: str,
    lengths: list[int],
    queries: int,
    num_new: int,
    window: int | None,
    causal: bool,
) -> None:
    backend = backend_on(device_of(dialect, "shuffled"), dialect)
    lengths = [max(length, queries - num_new) for length in lengths]
    batch = written(backend, same(64), MIXED, [*lengths, 1])
    batch.metadata = AttentionMetadata(
        batch.metadata.block_tables[:-1], tuple(lengths), (0,) * len(lengths)
    )
    error = batch.attend(queries, new_tokens=num_new, window=window, causal=causal, with_sinks=True)
    assert error <= TOLERANCES[mx.float16]


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(FORMATS, [mx.bfloat16, mx.float16] * 2, strict=True))
)
def test_a_page_has_the_plain_backends_bytes_and_the_others_stay(
    dialect: str, name: FormatName, dtype: mx.Dtype
) -> None:
    """A step, also with other strides, as models produce them, and a page of it that is recoded."""
    keys = normal((1, 270, 2, 96), dtype, seed=1).transpose(0, 2, 1, 3)
    values = normal((1, 2, 270, 128), dtype, seed=2)
    assert _other_bytes(dialect, name, keys, values) <= (0 if name == "fp16" else OTHER_BYTES)


@pytest.mark.parametrize(("dim", "name"), [(64, "q8"), (64, "q4"), (256, "q4"), (512, "q4")])
def test_numbers_that_are_rotated_exactly_have_the_plain_backends_bytes(
    dialect: str, dim: int, name: FormatName
) -> None:
    """Multiples of 1/32, and a rotation whose scale is 1/8 or 1/16."""
    shape = 1, 1 if dim == 512 else 2, 270, dim
    keys, values = (mx.round(32 * normal(shape, mx.float16, seed)) / 32 for seed in (1, 2))
    assert _other_bytes(dialect, name, keys, values) <= (OTHER_BYTES if dim == 512 else 0)


def _other_bytes(dialect: str, name: FormatName, keys: mx.array, values: mx.array) -> float:
    """The share of bytes of recoded pages that differ from the plain backend's, after a step with
    these keys and values. Those of written pages are equal."""
    backends: list[Any] = [backend_on(device_of(dialect, "shuffled"), dialect), Backend()]
    geometry = same(keys.shape[3], keys.dtype, heads=keys.shape[1], v_dim=values.shape[3])
    keys[..., 7] *= 20
    keys += 5
    values[:, -1, 9] = 0
    written, recoded = [], []
    for backend in backends:
        pages = new_pages(backend, geometry, ["fp16", name])
        metadata = AttentionMetadata(((2, 0, 1),), (250 + keys.shape[2],), (0,))
        pages.write(keys, values, metadata)
        pages.copy({0: STRIDE + 1})
        written.append([np.array(pages.page(entry)) for entry in range(8)])
        recoded.append([np.array(pages.page(STRIDE + at)).view(np.uint8) for at in range(8)])
    assert (np.array(written[0]) == np.array(written[1])).all()
    return float(np.mean([one != other for one, other in zip(*recoded, strict=True)]))


@pytest.mark.parametrize("name", FORMATS)
def test_gather(dialect: str, name: FormatName) -> None:
    """With sink tokens, tokens that a window has passed, padding and new tokens."""
    backend = backend_on(device_of(dialect, "shuffled"), dialect)
    batch = written(backend, same(96, v_dim=64), [name], [300, 40, 0])
    new_tokens = normal((3, 2, 6, 96), mx.float16, 5), normal((3, 2, 6, 64), mx.float16, 6)
    tables, padding, firsts, heads = (
        batch.metadata.block_tables,
        (0, 3, 2),
        (100, 20, 0),
        (10, 4, 0),
    )
    without_new = AttentionMetadata(tables, (300, 40, 0), padding, firsts, heads)
    # Two of the 6 tokens of the last sequence's step are padding.
    with_new = AttentionMetadata(tables, (306, 46, 4), padding, firsts, heads)
    plain = LayerPages(batch.pages.geometry, Backend(), STRIDE)
    plain.slabs = batch.pages.slabs
    for metadata, unwritten in ((without_new, None), (with_new, new_tokens)):
        ours, theirs = batch.pages.gather(metadata, unwritten), plain.gather(metadata, unwritten)
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape
            # Rotated in another order of sums, and rounded to float16.
            assert np.allclose(numbers(one), numbers(other), rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 96])
def test_pages_recoded_in_one_basis_have_the_bytes_of_plain_operations(
    dialect: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also their centres. Only the model's dtype, to which plain operations would round, is left
    out, and the rotations: they encode the numbers of the source's codes."""
    backend = backend_on(device_of(dialect, "shuffled"), dialect)
    batch = written(backend, same(dim), ["q8", "q4"], [256])
    pages, entry, to = batch.pages, batch.metadata.block_tables[0][0], STRIDE + 2
    pages.copy({entry: to})
    before, after = pages.layout_of(entry), pages.layout_of(to)
    monkeypatch.setattr(number_format, "rotate", lambda numbers: numbers)
    held = KEY_FORMATS["q8"].decode(_planes(before, pages.page(entry))[:2], mx.float32)
    expected = KEY_FORMATS["q4"].encode(held)
    found = _planes(after, pages.page(to))[:3]
    assert [plane.shape for plane in found] == [plane.shape for plane in expected]
    for one, other in zip(found, expected, strict=True):
        assert mx.array_equal(one, other)


def test_tokens_that_are_not_finite_spoil_no_other(dialect: str) -> None:
    """A head with such a token has no mean, nor has a number that float16 cannot hold once it is
    rotated. Zeros of either sign keep theirs. Multiples of 1/32 are rotated exactly."""
    backend, geometry = backend_on(device_of(dialect, "shuffled"), dialect), same(64, heads=4)
    keys = mx.round(32 * off_centre(normal((1, 4, 256, 64), mx.float16, seed=1)) + 96) / 32
    keys[0, 0, 9, 5], keys[0, 0, 77, 40], keys[0, 3] = math.nan, math.inf, -0.0
    rotated = mx.where(mx.arange(64) == 9, 2.0**17, 4.0)
    keys[0, 2] = rotate(rotated)
    found = []
    for each in (backend, Backend()):
        pages = new_pages(each, geometry, ["fp16", "q4"])
        pages.write(keys, keys, AttentionMetadata(((0,),), (256,), (0,)))
        pages.copy({0: STRIDE})
        found.append(_planes(pages.layout_of(STRIDE), pages.page(STRIDE)))
    finite = [slot for slot in range(256) if slot not in (9, 77)]
    for plane, (one, other) in enumerate(zip(*found, strict=True)):
        slots = finite if one.shape[1] == 256 else [0]
        assert (np.asarray(one)[:, slots] == np.asarray(other)[:, slots]).all(), plane
    centres = np.asarray(found[0][2]).view(np.float16)[:, 0]
    assert not centres[0].any()
    assert centres[1].all()
    assert centres[2].tolist() == np.where(np.arange(64) == 9, 0, 4).tolist()
    assert np.signbit(centres[3]).tolist() == [True] + [False] * 63


def _planes(layout: PageLayout, page: mx.array) -> list[mx.array]:
    """A page's planes, [heads, slots, slot_words]."""
    words = page.reshape(-1)
    return [
        words[first : first + plane.words].reshape(plane.heads, plane.slots, plane.slot_words)
        for first, plane in zip(layout.offsets, layout.planes, strict=True)
    ]


def test_pages_are_loaded_whole(dialect: str) -> None:
    backend = backend_on(device_of(dialect), dialect)
    pages = new_pages(backend, same(64), ["q4", "fp16"])
    contents = {
        entry: mx.random.randint(0, 1 << 16, pages.page(entry).shape).astype(mx.uint16)
        for entry in (1, 3, STRIDE)
    }
    before = np.array(pages.page(2))
    pages.load(contents)
    for entry, content in contents.items():
        assert (np.asarray(pages.page(entry)) == np.asarray(content)).all()
    assert (np.asarray(pages.page(2)) == before).all()
