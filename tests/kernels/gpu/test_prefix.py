"""The GPU kernels that read shared pages once for several sequences, on this CPU with every access
checked, against float64."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.pages import tables as groups_module
from paged_kv.kernels.pages.page_format import PAGE_SIZE, FormatName
from paged_kv.kernels.pages.tables import SEQUENCES
from tests.support.gpu_pages import (
    DIALECTS,
    TOLERANCES,
    Separately,
    backend_on,
    device_of,
    needs_compiler,
    rarely,
    same,
)
from tests.support.gpu_prefixes import FORMATS, Table, batch_of, names, tables_behind

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.parametrize("dialect", DIALECTS)]


@pytest.fixture(autouse=True)
def groups_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "LEAST_SAVED", 1)


@pytest.mark.parametrize(
    ("formats", "dtype"), list(zip(FORMATS, [mx.float16, mx.bfloat16] * 2, strict=True))
)
def test_tails_of_any_length_behind_shared_pages(
    dialect: str, formats: Sequence[FormatName], dtype: mx.Dtype
) -> None:
    device = device_of(dialect, "shuffled")
    tables = tables_behind(1, [1, 1, 0, 2], 4)
    slabs = [*formats] * (4 // len(formats))
    batch = batch_of(device, dialect, tables, [1, 40, 256, 9], slabs, same(64, dtype))
    assert batch.attend(1) <= TOLERANCES[dtype]
    assert names(device) == ["groups", "decode", "merge"]


@pytest.mark.parametrize("dims", [(80, 80), (512, 512), *map(rarely, [(192, 128), (256, 256)])])
def test_sizes_of_heads(dialect: str, dims: tuple[int, int]) -> None:
    device = device_of(dialect)
    geometry = same(dims[0], v_dim=dims[1])
    batch = batch_of(device, dialect, tables_behind(2, [1, 1, 1]), [3, 4, 5], geometry=geometry)
    assert batch.attend(1, gqa_group_size=2) <= TOLERANCES[mx.float16]
    assert names(device)[0] == "groups"


def test_a_tree_and_more_sequences_than_a_group_has(dialect: str) -> None:
    """One system prompt, two sets of tools behind it, forks behind one of them."""
    prompt, tools, others = (0,), (1, 2), (3,)
    tables: list[Table] = [(*prompt, *tools, 4 + row) for row in range(SEQUENCES + 1)]
    tables += [(*prompt, *others, 24), (*prompt, *others, 25), (*prompt, 26), (27,)]
    tables += [(*prompt, *tools, 4)]  # a fork that has written nothing yet
    device = device_of(dialect, "shuffled")
    tails = [(7 * row) % PAGE_SIZE + 1 for row in range(len(tables))]
    tails[-1] = tails[0]
    batch = batch_of(device, dialect, tables, tails, ["fp16"] * 4)
    assert batch.attend(1) <= TOLERANCES[mx.float16]
    assert names(device) == ["groups", "decode", "merge"]


@pytest.mark.parametrize("window", [200, 300])
def test_windows_that_begin_in_own_and_in_shared_pages(dialect: str, window: int) -> None:
    device = device_of(dialect)
    batch = batch_of(device, dialect, tables_behind(2, [1, 1, 1]), [20, 100, 1])
    for queries in (1, 3):
        assert batch.attend(queries, window=window) <= TOLERANCES[mx.float16]
    assert names(device).count("groups") == 2


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{"with_sinks": False}, {"softcap": 0.5}, {"causal": False}, {"new_tokens": 3}],
    ids=str,
)
def test_options_of_attention(dialect: str, queries: int, options: dict[str, Any]) -> None:
    if options.get("new_tokens") and queries == 1:
        options = {"new_tokens": 1}
    device = device_of(dialect)
    batch = batch_of(device, dialect, tables_behind(1, [1, 1, 1]), [20, 100, 3])
    assert batch.attend(queries, **{"with_sinks": True} | options) <= TOLERANCES[mx.float16]
    assert "groups" in names(device)


def test_steps_of_drafts_and_their_padding(dialect: str) -> None:
    device = device_of(dialect, "shuffled")
    # The first sequence ends within the shared page.
    tables = tables_behind(1, [0, 1, 1, 1])
    batch = batch_of(device, dialect, tables, [200, 5, 6, 7], ["fp16"], right_padding=[1, 0, 2, 5])
    assert batch.attend(5, gqa_group_size=2) <= TOLERANCES[mx.float16]
    assert names(device) == ["groups", "prefill", "merge"]


@pytest.mark.parametrize("gqa_group_size", [1, 4])
def test_a_step_that_is_written_too(dialect: str, gqa_group_size: int) -> None:
    device = device_of(dialect, "shuffled")
    batch = batch_of(device, dialect, tables_behind(2, [1, 1, 1]), [5, 255, 31])
    backend = backend_on(device, dialect)
    options: Any = {"gqa_group_size": gqa_group_size, "with_sinks": True}
    assert batch.write_and_attend(backend, **options) <= TOLERANCES[mx.float16]
    other = batch_of(device, dialect, tables_behind(2, [1, 1, 1]), [5, 255, 31])
    other.write_and_attend(Separately(backend), **options)
    assert batch.bytes() == other.bytes()


def test_a_context_is_read_in_parts(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(tuning.LEAST_TOKENS, 4))
    monkeypatch.setattr(groups_module, "GROUP_PAGES", 1)
    device = device_of(dialect)
    batch = batch_of(device, dialect, tables_behind(3, [1, 1]), [200, 100], ["q4"])
    assert batch.attend(1) <= TOLERANCES[mx.float16]


def test_queries_that_leave_no_room_for_two_sequences(dialect: str) -> None:
    device = device_of(dialect)
    batch = batch_of(device, dialect, tables_behind(1, [1, 1]), [20, 3])
    assert batch.attend(9, gqa_group_size=4) <= TOLERANCES[mx.float16]
    assert names(device) == ["prefill"]


@pytest.mark.soak
def test_shared_pages_are_loaded_once(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 sequences behind 8,192 tokens: at most an eighth of the loads that each alone makes."""

    def loads(least_saved: int) -> int:
        monkeypatch.setattr(groups_module, "LEAST_SAVED", least_saved)
        device = device_of(dialect)
        tables = tables_behind(32, [1] * 16, 6)
        geometry = same(64, heads=1)
        batch = batch_of(device, dialect, tables, [1] * 16, ["q4"] * 6, geometry)
        assert batch.attend(1, gqa_group_size=4) <= TOLERANCES[mx.float16]
        return sum(slab.loads for launch in device.launches for slab in launch.slabs)

    assert loads(1) * 8 <= loads(1 << 30)


def test_groups_that_save_little_are_not_made(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "LEAST_SAVED", 16)
    for sequences, in_groups in ((17, False), (18, True)):  # the 17th is a group of its own
        device = device_of(dialect)
        tables = tables_behind(1, [1] * sequences, 5)
        batch = batch_of(device, dialect, tables, [3] * sequences, ["fp16"] * 5)
        assert batch.attend(1) <= TOLERANCES[mx.float16]
        assert ("groups" in names(device)) == in_groups
