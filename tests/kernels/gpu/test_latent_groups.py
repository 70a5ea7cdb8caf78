"""The GPU kernels of latent attention, also those that read latents once for several sequences, on
this CPU with every access checked, against float64."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.pages import tables as groups_module
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.page_format import FormatName, LayerGeometry
from paged_kv.kernels.pages.tables import SEQUENCES
from tests.support.arrays import normal
from tests.support.gpu_pages import (
    DIALECTS,
    MIXED,
    TOLERANCES,
    Batch,
    backend_on,
    device_of,
    needs_compiler,
    rarely,
    written,
)
from tests.support.gpu_prefixes import FORMATS, Table, batch_of, names, tables_behind

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.parametrize("dialect", DIALECTS)]

IN_GROUPS = ["groups", "latent", "merge"]


@pytest.fixture
def parts_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are read in parts of at least so many tokens."""
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(tuning.LEAST_TOKENS, 16))


@pytest.fixture(autouse=True)
def groups_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "LEAST_SAVED", 1)


def latents(dim: int = 64, positions: int = 64, dtype: mx.Dtype = mx.float16) -> LayerGeometry:
    return LayerGeometry(1, dim, dtype, 1, positions, dtype)


def alone(
    dialect: str,
    geometry: LayerGeometry,
    formats: Sequence[FormatName],
    lengths: Sequence[int],
    *orders: str,
    right_padding: Sequence[int] = (),
) -> Batch:
    """Sequences that share no pages."""
    backend = backend_on(device_of(dialect, *orders), dialect)
    assert backend.supports(geometry)
    return written(backend, geometry, formats, lengths, right_padding)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", mx.float16), ("q8", mx.bfloat16), ("q4", mx.float16), (("q4", "fp16"), mx.float16)],
)
def test_rows_that_end_at_the_edges_of_pages(
    dialect: str, name: FormatName, dtype: mx.Dtype
) -> None:
    batch = alone(dialect, latents(dtype=dtype), [name], [257, 9, 0], "shuffled")
    assert batch.attend_latent(5) <= TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("sizes", "formats", "heads"),
    [((512, 64), ["fp16", "q4"], 20), ((80, 64), ["fp16"], 3), rarely((128, 96), ["fp16"], 3)],
)
def test_sizes_of_latents(
    dialect: str, sizes: tuple[int, int], formats: list[FormatName], heads: int
) -> None:
    batch = alone(dialect, latents(*sizes), formats, [40, 13])
    assert batch.attend_latent(heads) <= TOLERANCES[mx.float16]


@pytest.mark.parametrize("window", [1, 8, 9, 100])
def test_windows(dialect: str, window: int) -> None:
    batch = alone(dialect, latents(), ["fp16"], [270, 30])
    assert batch.attend_latent(4, window=window) <= TOLERANCES[mx.float16]


@pytest.mark.usefixtures("parts_of_16")
def test_a_context_is_read_in_parts(dialect: str) -> None:
    batch = alone(dialect, latents(), MIXED, [300, 20, 0], "shuffled")
    assert tuning.latent_parts(dialect, 3, 4, 300) == (2, 19)
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


def test_a_padding_query_gets_finite_numbers(dialect: str) -> None:
    batch = alone(dialect, latents(), ["fp16"], [40, 20, 0], right_padding=[0, 1, 1])
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


def test_steps_of_several_tokens(dialect: str) -> None:
    batch = alone(dialect, latents(512, 64), ["fp16"], [40, 20, 2])
    for queries, causal in ((3, True), (2, False)):
        assert batch.attend_latent(4, queries, causal=causal) <= TOLERANCES[mx.float16]


def test_latents_of_512_have_no_kernel_for_heads(dialect: str) -> None:
    """Pages of these sizes that are taken for keys and values after all are gathered."""
    batch = alone(dialect, latents(512, 64), ["fp16"], [40, 20])
    assert batch.attend(1) <= TOLERANCES[mx.float16]
    longer = AttentionMetadata(batch.metadata.block_tables, (41, 21), (0, 0))
    step = [normal((2, 1, 1, dim), mx.float16, 3) for dim in (512, 64)]
    batch.pages.write_later(step[0], step[1], longer)
    asked = normal((2, 3, 1, 512), mx.float16, 4)
    found = batch.pages.attend(asked, longer, Attention(0.1))
    batch.metadata = longer
    assert mx.array_equal(found, batch.pages.attend(asked, longer, Attention(0.1)))
    assert batch.attend(1) <= TOLERANCES[mx.float16]


def test_chosen_tokens_are_those_of_a_gather(dialect: str) -> None:
    """No kernel does it, so it waits for those that write."""
    backend = backend_on(device_of(dialect), dialect)
    batch = written(backend, latents(), ["fp16", "q8"], [300, 20, 0])
    indices = mx.array([[0, 299, 40], [280, 299, 10], [0, 1, 2]], mx.uint32)
    found = batch.pages.gather_tokens(batch.metadata, indices)
    assert backend.fallbacks == 1
    for tokens, everything in zip(found, batch.pages.gather(batch.metadata), strict=True):
        expected = mx.take_along_axis(everything, indices[:, None, :, None], axis=2)
        assert mx.array_equal(tokens, expected)


@pytest.mark.parametrize(
    ("formats", "dtype"), list(zip(FORMATS, [mx.float16, mx.bfloat16] * 2, strict=True))
)
def test_tails_of_any_length_behind_shared_pages(
    dialect: str, formats: Sequence[FormatName], dtype: mx.Dtype
) -> None:
    device = device_of(dialect, "shuffled")
    tables = tables_behind(1, [1, 1, 0, 2], 4)
    slabs = [*formats] * (4 // len(formats))
    batch = batch_of(device, dialect, tables, [1, 40, 256, 9], slabs, latents(dtype=dtype))
    assert batch.attend_latent(5) <= TOLERANCES[dtype]
    assert names(device) == IN_GROUPS


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((512, 64), "q4"), ((192, 80), "fp16"), rarely((256, 64), "q8")],
)
def test_sizes_of_latents_in_groups(dialect: str, sizes: tuple[int, int], name: FormatName) -> None:
    """Rows of a sequence's heads lie in two threadgroups."""
    device = device_of(dialect, "shuffled")
    tables = tables_behind(1, [1] * 4)
    batch = batch_of(device, dialect, tables, [3, 4, 5, 6], [name], latents(*sizes))
    assert batch.attend_latent(20) <= TOLERANCES[mx.float16]
    assert names(device) == IN_GROUPS


def test_a_tree_and_more_sequences_than_a_group_has(dialect: str) -> None:
    tables: list[Table] = [(0, 1, 2, 4 + row) for row in range(SEQUENCES + 1)]
    tables += [(0, 3, 24), (0, 3, 25), (0, 26), (27,)]
    tables += [(0, 1, 2, 4)]  # a fork that has written nothing yet
    tails = [(7 * row) % 256 + 1 for row in range(len(tables))]
    tails[-1] = tails[0]
    device = device_of(dialect, "shuffled")
    batch = batch_of(device, dialect, tables, tails, ["fp16"] * 4, latents())
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]
    assert names(device) == IN_GROUPS


@pytest.mark.parametrize("window", [5, 200, 300])
def test_windows_that_begin_in_own_and_in_shared_pages(dialect: str, window: int) -> None:
    device = device_of(dialect)
    tables = tables_behind(2, [1, 1, 1])
    batch = batch_of(device, dialect, tables, [20, 100, 1], geometry=latents())
    assert batch.attend_latent(4, window=window) <= TOLERANCES[mx.float16]
    assert names(device) == IN_GROUPS


def test_padding_sequences_and_one_that_ends_in_a_shared_page(dialect: str) -> None:
    device = device_of(dialect)
    options: Any = {"geometry": latents(), "right_padding": [1, 0, 0, 1]}
    batch = batch_of(device, dialect, tables_behind(1, [0, 0, 1, 1]), [30, 100, 3, 20], **options)
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


@pytest.mark.usefixtures("parts_of_16")
def test_groups_are_read_in_parts(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "GROUP_PAGES", 1)
    device = device_of(dialect)
    tables = tables_behind(3, [1, 1])
    batch = batch_of(device, dialect, tables, [200, 100], ["q4"], latents())
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


def test_more_heads_than_a_threadgroup_has_rows(dialect: str) -> None:
    device = device_of(dialect, checked=False)
    batch = batch_of(device, dialect, tables_behind(1, [1, 1]), [2, 3], geometry=latents(512))
    assert batch.attend_latent(70) <= TOLERANCES[mx.float16]
    assert names(device) == IN_GROUPS


@pytest.mark.soak
@pytest.mark.parametrize(("heads", "share"), [(4, 14), (8, 7.5), (16, 3.9), (40, 4.5)])
def test_shared_latents_are_loaded_once(
    dialect: str, heads: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 query rows of a group read them together, where each sequence alone reads them once for
    every 16 heads."""

    def loads(least_saved: int) -> int:
        monkeypatch.setattr(groups_module, "LEAST_SAVED", least_saved)
        device = device_of(dialect)
        tables = tables_behind(2, [1] * 16, 3)
        batch: Batch = batch_of(device, dialect, tables, [1] * 16, ["q4"] * 3, latents(512))
        assert batch.attend_latent(heads) <= TOLERANCES[mx.float16]
        return sum(slab.loads for launch in device.launches for slab in launch.slabs)

    assert loads(1) * share <= loads(1 << 30)
