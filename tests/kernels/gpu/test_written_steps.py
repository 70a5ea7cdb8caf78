"""The kernel that attends and also writes the step, on this CPU: against dense attention over the
numbers in the pages afterwards, and against the kernel that only writes."""

from itertools import product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.gpu import tuning as gpu_tuning
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.arrays import normal, numbers
from tests.support.examples import examples
from tests.support.gpu_on_cpu.emulated import Device
from tests.support.gpu_pages import (
    ALL_DIALECTS,
    DIALECTS,
    TOLERANCES,
    Separately,
    backend_on,
    device_of,
    needs_compiler,
    new_pages,
    same,
    written,
)
from tests.support.grids import plain_cases, plain_only

pytestmark = needs_compiler

ORDERS = ("forward", "reverse", "shuffled")
FORMATS: list[FormatName] = ["fp16", "q8", "q4", ("fp16", "q4"), ("q4", "fp16")]
# The last token is the first of a page, its last one, the second of a sequence, and the first of
# one.
EDGES = (256, 255, 1, 0)


def _is_right(
    device: Device,
    dialect: str,
    geometry: LayerGeometry,
    formats: list[FormatName],
    lengths: tuple[int, ...],
    **options: Any,
) -> bool:
    """Whether attention matches the pages, and the pages match those that the kernel that only
    writes would leave. The step's own pages have 16 bits, those before it these formats."""
    backend = backend_on(device, dialect)
    batch, other = (written(backend, geometry, formats, lengths, more=True) for _ in range(2))
    error = batch.write_and_attend(backend, **options)
    other.write_and_attend(Separately(backend), **options)
    return error <= TOLERANCES[geometry.k_dtype] and batch.bytes() == other.bytes()


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    plain_cases(
        [("fp16", mx.float16), ("q8", mx.bfloat16), ("q4", mx.float16)],
        product(FORMATS, TOLERANCES),
    ),
)
def test_the_last_token_anywhere_in_a_page(dialect: str, name: FormatName, dtype: mx.Dtype) -> None:
    device = device_of(dialect, *ORDERS)
    assert _is_right(device, dialect, same(64, dtype), [name], EDGES)


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
@pytest.mark.parametrize("rows", [1, 8])
def test_slabs_of_several_formats(dialect: str, rows: int) -> None:
    device, lengths = device_of(dialect, "shuffled"), (300, 33, 0, 5, 31, 64, 2, 9)[:rows]
    formats: list[FormatName] = ["fp16", "q4", "q8"]
    assert _is_right(device, dialect, same(64), formats, lengths, with_sinks=True)


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
@pytest.mark.parametrize("window", plain_only([33], [1, 2, 32, 33, 256, 5000]))
def test_windows(dialect: str, window: int) -> None:
    formats: list[FormatName] = ["fp16", ("q8", "fp16")]
    device = device_of(dialect, "reverse")
    assert _is_right(device, dialect, same(64), formats, (300, 30), window=window, with_sinks=True)


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
def test_softcapped_scores(dialect: str) -> None:
    device = device_of(dialect, "shuffled")
    assert _is_right(device, dialect, same(64), ["fp16", "q4"], (300, 5, 0), softcap=0.5)


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
@pytest.mark.parametrize("gqa_group_size", plain_only([1, 12], [1, 2, 7, 12, 20, 40]))
def test_any_number_of_query_heads_to_a_kv_head(dialect: str, gqa_group_size: int) -> None:
    device = device_of(dialect, "shuffled")
    assert _is_right(device, dialect, same(64), ["fp16"], (40, 300), gqa_group_size=gqa_group_size)


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
@pytest.mark.parametrize(
    ("k_dim", "v_dim", "name"),
    plain_cases(
        [(80, 80, "fp16"), (256, 256, "q4")],
        [
            *((dim, dim, "fp16") for dim in (80, 96, 128, 192, 256)),
            *((dim, dim, "q4") for dim in (96, 128, 192, 256)),
            (192, 128, "q8"),
            (80, 64, ("fp16", "q4")),
        ],
    ),
)
def test_head_sizes(dialect: str, k_dim: int, v_dim: int, name: FormatName) -> None:
    device = device_of(dialect)
    assert _is_right(device, dialect, same(k_dim, v_dim=v_dim), [name], (70,), with_sinks=True)


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
@pytest.mark.parametrize("formats", [["fp16"], ["q8"], ["fp16", "q4"]])
def test_contexts_of_several_parts(
    dialect: str, formats: list[FormatName], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tuning, "LEAST_TOKENS", dict.fromkeys(gpu_tuning.LEAST_TOKENS, 4))
    device = device_of(dialect, "shuffled")
    assert _is_right(
        device, dialect, same(64), formats, (150, 40), gqa_group_size=9, with_sinks=True
    )
    decodes = [launch for launch in device.launches if "_decode" in launch.name]
    assert all("_partial_" in launch.name for launch in decodes)


# Compiled once for all of hypothesis's examples, and run without checks of every access.
_random_formats: list[list[FormatName]] = [["fp16"], ["q8", "q4"], ["q4", "fp16", ("q8", "fp16")]]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ALL_DIALECTS)
@examples(12)
@given(
    lengths=st.lists(st.integers(0, 600), min_size=1, max_size=3),
    formats=st.sampled_from(_random_formats),
    window=st.none() | st.integers(1, 700),
    with_sinks=st.booleans(),
    least_tokens=st.sampled_from([4, 128]),
)
def test_steps_of_any_length(
    dialect: str,
    lengths: list[int],
    formats: list[FormatName],
    window: int | None,
    with_sinks: bool,
    least_tokens: int,
) -> None:
    device = device_of(dialect, "shuffled", checked=False)
    options: dict[str, Any] = {"window": window, "with_sinks": with_sinks}
    with patch.object(
        gpu_tuning, "LEAST_TOKENS", dict.fromkeys(gpu_tuning.LEAST_TOKENS, least_tokens)
    ):
        assert _is_right(device, dialect, same(64), formats, (*lengths, 1), **options)


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
def test_padding_is_not_written_and_sees_nothing(dialect: str) -> None:
    """The second sequence's step is padding after its tokens, the third's is before its first."""
    backend = backend_on(device_of(dialect, *ORDERS), dialect)
    outputs, held = [], []
    for asked in (backend, Separately(backend)):
        batch = written(backend, same(64), ["fp16"], [30, 20, 0], more=True)
        metadata = AttentionMetadata(batch.metadata.block_tables, (31, 20, 0), (0, 2, 0))
        step = normal((3, 2, 1, 64), mx.float16, 1), normal((3, 2, 1, 64), mx.float16, 2)
        queries = normal((3, 4, 1, 64), mx.float16, 3)
        attention = Attention(0.125)
        outputs.append(asked.write_and_attend(batch.pages, step, queries, metadata, attention))
        held.append(batch.bytes())
    assert held[0] == held[1]
    assert mx.allclose(outputs[0], outputs[1], atol=1e-3)
    assert not numbers(outputs[0][1:]).any()


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
def test_a_ring_whose_oldest_page_is_also_its_newest(dialect: str) -> None:
    """The window begins in the tile that the step is written to, 256 tokens later."""
    backend = backend_on(device_of(dialect, *ORDERS), dialect)
    step = normal((1, 2, 1, 64), mx.float16, 1), normal((1, 2, 1, 64), mx.float16, 2)
    queries, outputs = normal((1, 4, 1, 64), mx.float16, 3), []
    for asked in (backend, Separately(backend)):
        pages = new_pages(backend, same(64), ["fp16"])
        tokens = normal((1, 2, 256, 64), mx.float16, 4)
        backend.write(pages, tokens, tokens, AttentionMetadata(((3,),), (256,), (0,)))
        metadata = AttentionMetadata(((3, 3),), (300,), (0,), (60,))
        attention = Attention(0.125, window=240)
        outputs.append(numbers(asked.write_and_attend(pages, step, queries, metadata, attention)))
    assert abs(outputs[0] - outputs[1]).max() <= 1e-3


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
def test_layers_that_differ_share_the_metadata_of_a_step(dialect: str) -> None:
    """The plan that is made once per step is made for all that it depends on."""
    backend = backend_on(device_of(dialect, checked=False), dialect)
    batch = written(backend, same(64), ["fp16"], [100])
    queries, sinks = normal((1, 8, 1, 64), mx.float16, 1), mx.ones((8,))
    layers = [
        Attention(0.5),
        Attention(0.25),
        Attention(0.5, window=9),
        Attention(0.5, sinks=sinks),
        Attention(0.5, softcap=2.0),
    ]
    found = []
    for attention in layers:
        shared = batch.pages.attend(queries, batch.metadata, attention)
        own = AttentionMetadata(((0,),), (100,), (0,))
        alone = batch.pages.attend(queries, own, attention)
        assert mx.array_equal(shared, alone)
        found.append(numbers(shared).tobytes())
    assert len(set(found)) == len(layers)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_how_many_launches_a_step_takes(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(dialect, checked=False)
    backend = backend_on(device, dialect)
    batch = written(backend, same(64), ["fp16"], [300], more=True)

    def launches(tokens: int, *, written: bool = False) -> list[str]:
        step = (normal((1, 2, tokens, 64), mx.float16, 1),) * 2
        queries, before = normal((1, 4, tokens, 64), mx.float16, 2), len(device.launches)
        metadata = AttentionMetadata(batch.metadata.block_tables, (300 + tokens,), (0,))
        attention = Attention(0.125)
        if written:
            backend.attend(batch.pages, queries, metadata, attention)
        else:
            backend.write_and_attend(batch.pages, step, queries, metadata, attention)
        return [launch.name.split("_")[2] for launch in device.launches[before:]]

    whole = ["decode"] if dialect == "metal" else ["decode", "merge"]
    assert launches(1) == whole
    assert launches(1, written=True) == whole
    assert launches(9) == ["write", "prefill"]
    assert launches(64) == ["write", "prefill" if dialect == "metal" else "gather"]
    monkeypatch.setattr(gpu_tuning, "LEAST_TOKENS", dict.fromkeys(gpu_tuning.LEAST_TOKENS, 4))
    backend = backend_on(device, dialect)  # plans are kept
    assert launches(1) == ["decode", "merge"]
    assert launches(1, written=True) == ["decode", "merge"]
