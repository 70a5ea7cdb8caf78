"""The GPU kernel of latent attention on this CPU, with every access checked, against float64."""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.arrays import normal
from tests.support.gpu_pages import (
    ALL_DIALECTS,
    TOLERANCES,
    Batch,
    backend_on,
    device_of,
    needs_compiler,
    written,
)
from tests.support.grids import plain_only

pytestmark = [needs_compiler, pytest.mark.parametrize("dialect", ALL_DIALECTS)]

ORDERS = ("forward", "reverse", "shuffled")
FORMATS: list[FormatName] = ["fp16", "q8", "q4", ("q8", "q4"), ("q4", "fp16")]


def latents(dim: int, positions: int, dtype: mx.Dtype = mx.float16) -> LayerGeometry:
    return LayerGeometry(1, dim, dtype, 1, positions, dtype)


def batch_of(
    dialect: str,
    geometry: LayerGeometry,
    formats: Sequence[FormatName],
    lengths: Sequence[int],
    *orders: str,
    right_padding: Sequence[int] = (),
) -> Batch:
    backend = backend_on(device_of(dialect, *orders), dialect)
    assert backend.supports(geometry)
    return written(backend, geometry, formats, lengths, right_padding)


@pytest.mark.parametrize("dtype", plain_only([mx.float16], TOLERANCES))
@pytest.mark.parametrize("name", plain_only(["fp16", "q4"], FORMATS))
def test_rows_that_end_at_the_edges_of_pages(
    dialect: str, name: FormatName, dtype: mx.Dtype
) -> None:
    batch = batch_of(dialect, latents(64, 64, dtype), [name], [257, 9, 0], *ORDERS)
    assert batch.attend_latent(5) <= TOLERANCES[dtype]


@pytest.mark.parametrize("formats", plain_only([["fp16"]], [["fp16"], ["q4", "q8"]]))
def test_deepseeks_sizes(dialect: str, formats: list[FormatName]) -> None:
    assert (
        batch_of(dialect, latents(512, 64), formats, [70]).attend_latent(20)
        <= TOLERANCES[mx.float16]
    )


@pytest.mark.parametrize("sizes", plain_only([(80, 64)], [(80, 64), (256, 64), (128, 96)]))
def test_other_sizes(dialect: str, sizes: tuple[int, int]) -> None:
    batch = batch_of(dialect, latents(*sizes), ["fp16"], [40, 13])
    assert batch.attend_latent(3) <= TOLERANCES[mx.float16]


@pytest.mark.parametrize("window", [1, 8, 9, 100])
def test_windows(dialect: str, window: int) -> None:
    batch = batch_of(dialect, latents(64, 64), ["fp16"], [270, 30])
    assert batch.attend_latent(4, window=window) <= TOLERANCES[mx.float16]


def test_pages_of_several_formats(dialect: str) -> None:
    batch = batch_of(dialect, latents(64, 64), FORMATS[:4], [300, 600], "shuffled")
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


def test_a_context_is_read_in_parts(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(tuning.LEAST_TOKENS, 16))
    batch = batch_of(dialect, latents(64, 64), ["fp16", "q8"], [300, 20, 0], "shuffled")
    assert tuning.latent_parts(dialect, 3, 4, 300) == (2, 19)
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


def test_a_padding_query_gets_finite_numbers(dialect: str) -> None:
    batch = batch_of(dialect, latents(64, 64), ["fp16"], [40, 20, 0], right_padding=[0, 1, 1])
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


def test_steps_of_several_tokens(dialect: str) -> None:
    batch = batch_of(dialect, latents(512, 64), ["fp16"], [40, 20, 2])
    for queries, causal in ((3, True), (2, False)):
        assert batch.attend_latent(4, queries, causal=causal) <= TOLERANCES[mx.float16]


def test_latents_of_512_have_no_kernel_for_heads(dialect: str) -> None:
    """Pages of these sizes that are taken for keys and values after all are gathered."""
    batch = batch_of(dialect, latents(512, 64), ["fp16"], [40, 20])
    assert batch.attend(1) <= TOLERANCES[mx.float16]
    longer = AttentionMetadata(batch.metadata.block_tables, (41, 21), (0, 0))
    step = [normal((2, 1, 1, dim), mx.float16, 3) for dim in (512, 64)]
    batch.pages.write_later(step[0], step[1], longer)
    asked = normal((2, 3, 1, 512), mx.float16, 4)
    found = batch.pages.attend(asked, longer, Attention(0.1))
    batch.metadata = longer
    assert mx.array_equal(found, batch.pages.attend(asked, longer, Attention(0.1)))
    assert batch.attend(1) <= TOLERANCES[mx.float16]


def test_queries_of_another_dtype(dialect: str) -> None:
    batch = batch_of(dialect, latents(64, 64), ["fp16"], [40])
    asked, positions = (normal((1, 4, 1, 64), mx.float32, seed) for seed in (1, 2))
    found = batch.pages.attend_latent(asked, positions, batch.metadata, Attention(0.1))
    assert found.dtype == mx.float32
    halves = asked.astype(mx.float16), positions.astype(mx.float16)
    other = batch.pages.attend_latent(*halves, metadata=batch.metadata, attention=Attention(0.1))
    assert mx.allclose(found, other.astype(mx.float32))


def test_chosen_tokens_are_those_of_a_gather(dialect: str) -> None:
    """No kernel does it, so it waits for those that write."""
    backend = backend_on(device_of(dialect), dialect)
    batch = written(backend, latents(64, 64), ["fp16", "q8"], [300, 20, 0])
    indices = mx.array([[0, 299, 40], [280, 299, 10], [0, 1, 2]], mx.uint32)
    found = batch.pages.gather_tokens(batch.metadata, indices)
    assert backend.fallbacks == 1
    for tokens, everything in zip(found, batch.pages.gather(batch.metadata), strict=True):
        expected = mx.take_along_axis(everything, indices[:, None, :, None], axis=2)
        assert mx.array_equal(tokens, expected)
