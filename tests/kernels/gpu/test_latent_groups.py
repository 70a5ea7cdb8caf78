"""The GPU kernel that reads latents once for several sequences, on this CPU with every access
checked, against float64."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.pages import prefix_groups as groups_module
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import PAGE_SIZE, FormatName
from paged_kv.kernels.pages.prefix_groups import SEQUENCES
from tests.support.gpu_pages import ALL_DIALECTS, TOLERANCES, Batch, device_of, needs_compiler
from tests.support.gpu_prefixes import FORMATS, ORDERS, Table, batch_of, names, tables_behind
from tests.support.grids import plain_cases, plain_only

pytestmark = [needs_compiler, pytest.mark.parametrize("dialect", ALL_DIALECTS)]

IN_GROUPS = ["groups", "latent", "merge"]


@pytest.fixture(autouse=True)
def groups_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "LEAST_SAVED", 1)


def latents(dim: int = 64, positions: int = 64, dtype: mx.Dtype = mx.float16) -> LayerGeometry:
    return LayerGeometry(1, dim, dtype, 1, positions, dtype)


@pytest.mark.parametrize("dtype", plain_only([mx.float16], TOLERANCES))
@pytest.mark.parametrize("formats", plain_only([["fp16"], FORMATS[-1]], FORMATS), ids=str)
def test_tails_of_any_length_behind_shared_pages(
    dialect: str, formats: Sequence[FormatName], dtype: mx.Dtype
) -> None:
    device = device_of(dialect, *ORDERS)
    tables = tables_behind(1, [1, 1, 0, 2], 4)
    slabs = [*formats] * (4 // len(formats))
    batch = batch_of(device, dialect, tables, [1, 40, 256, 9], slabs, latents(dtype=dtype))
    assert batch.attend_latent(5) <= TOLERANCES[dtype]
    assert names(device) == IN_GROUPS


@pytest.mark.parametrize(
    ("sizes", "name"),
    plain_cases(
        [((512, 64), "q4"), ((192, 80), "fp16")],
        [((512, 64), "q4"), ((256, 64), "q8"), ((192, 96), "q4"), ((192, 80), "fp16")],
    ),
)
def test_sizes_of_latents(dialect: str, sizes: tuple[int, int], name: FormatName) -> None:
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
    tails = [(7 * row) % PAGE_SIZE + 1 for row in range(len(tables))]
    tails[-1] = tails[0]
    device = device_of(dialect, "shuffled")
    batch = batch_of(device, dialect, tables, tails, ["fp16"] * 4, latents())
    assert batch.attend_latent(20) <= TOLERANCES[mx.float16]
    assert names(device) == IN_GROUPS


@pytest.mark.parametrize("window", [5, 200, 300, 700])
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


def test_a_context_is_read_in_parts(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(tuning.LEAST_TOKENS, 16))
    monkeypatch.setattr(groups_module, "GROUP_PAGES", 1)
    device = device_of(dialect)
    tables = tables_behind(3, [1, 1])
    batch = batch_of(device, dialect, tables, [200, 100], ["q4"], latents())
    assert batch.attend_latent(4) <= TOLERANCES[mx.float16]


def test_a_step_of_several_tokens_is_gathered(dialect: str) -> None:
    device = device_of(dialect)
    batch = batch_of(device, dialect, tables_behind(1, [1, 1]), [20, 3], geometry=latents())
    assert batch.attend_latent(4, 3) <= TOLERANCES[mx.float16]
    assert names(device) == ["gather"]


def test_more_heads_than_a_threadgroup_has_rows(dialect: str) -> None:
    device = device_of(dialect, checked=False)
    batch = batch_of(device, dialect, tables_behind(1, [1, 1]), [2, 3], geometry=latents(512))
    assert batch.attend_latent(70) <= TOLERANCES[mx.float16]
    assert names(device) == IN_GROUPS


@pytest.mark.slow
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
