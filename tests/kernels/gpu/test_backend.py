"""The choice of a backend for a device, and the calls that the GPU backend leaves to plain ones."""

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.command_line import main
from paged_kv.integrations.doctor import examination
from paged_kv.kernels import backends as backend_module
from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.gpu import tuning as gpu_tuning
from paged_kv.kernels.gpu.arrays import PARAMETERS
from paged_kv.kernels.gpu.backend import HEAD_SIZES, GpuBackend
from paged_kv.kernels.gpu.text import header_path
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import QuantisedPage
from paged_kv.kernels.pages.layer_memory import MAX_SLABS
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, FormatName, LayerGeometry
from paged_kv.kernels.pages.self_test import checks
from paged_kv.kernels.pages.tables import ROW_FIELDS, SEQUENCES
from tests.support.arrays import normal
from tests.support.generation import assert_same_run, greedy
from tests.support.gpu_pages import (
    DIALECTS,
    SHARED,
    TOLERANCES,
    Batch,
    backend_on,
    device_of,
    needs_compiler,
    new_pages,
    same,
    written,
)
from tests.support.zoo import small_model

# Of a model with random weights: mlx-lm's own differ from those in float32 by up to 0.14.
RANDOM_TOLERANCE = 0.25


@pytest.mark.parametrize("name", DIALECTS)
def test_a_gpu_backend_without_a_gpu_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", name)
    with pytest.raises(ValueError, match=f"no {name} here"):
        choose_backend()


@pytest.mark.parametrize("name", DIALECTS)
def test_a_gpu_is_served_by_its_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: name == "metal")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: name == "cuda")
    assert choose_backend().name == name


def test_supported_layers() -> None:
    def supports(*parts: Any) -> bool:
        return GpuBackend("metal", mx.fast.metal_kernel).supports(LayerGeometry(*parts))

    half, brain = mx.float16, mx.bfloat16
    assert supports(2, 80, half, 2, 80, half)
    assert supports(2, 256, brain, 2, 256, brain)
    assert supports(2, 192, half, 2, 128, half)
    assert supports(2, 512, half, 2, 512, half)
    assert supports(1, 512, half, 1, 64, half)
    assert not supports(2, 512, half, 2, 256, half)
    assert not supports(2, 256, half, 2, 512, half)
    assert not supports(2, 72, half, 2, 72, half)
    assert not supports(2, 64, mx.float32, 2, 64, mx.float32)
    assert not supports(2, 64, half, 1, 64, half)
    assert not supports(2, 64, half, 2, 64, brain)
    assert not supports(1, 576, half, 1, 512, half)
    assert not supports(2, 512, half, 2, 64, half)


def test_kernels_and_their_callers_mean_the_same_places_and_sizes() -> None:
    names = ("pages", "write", "decode", "prefill_plan")
    paths = [header_path("metal", name) for name in names]
    text = "".join(
        path.read_text() for path in [*paths, *(header_path(d, "matrices") for d in DIALECTS)]
    )
    listed = re.search(r"enum Parameter \{(.*?)\};", text, re.DOTALL)
    assert listed is not None
    places = re.findall(r"^  (\w+),?", listed[1], re.MULTILINE)
    assert tuple(place.lower() for place in places[:-1]) == PARAMETERS
    assert places[-1] == "PARAMETERS"

    def constants(name: str) -> list[int]:
        return [int(number) for number in re.findall(rf"CONSTANT uint {name} = (\d+)", text)]

    assert set(constants("SLABS")) == {MAX_SLABS}
    assert set(constants("ROW_FIELDS")) == {ROW_FIELDS}
    assert set(constants("PAGE_SIZE")) == {PAGE_SIZE}
    assert set(constants("TILE")) == {gpu_tuning.TILE}
    assert set(constants("SLOT_SIMDGROUPS")) == {gpu_tuning.SLOT_SIMDGROUPS}
    assert set(constants("SEQUENCES")) == {SEQUENCES}
    rows = constants("SIMDGROUP_ROWS")
    assert rows == [gpu_tuning.SIMDGROUP_ROWS[dialect] for dialect in DIALECTS]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
class TestOnThisCpu:
    def test_growth_compiles_no_kernel_again(self, dialect: str) -> None:
        """More slabs and longer tables use the same texts, whose names MLX compares. Only contexts
        of several parts need two others; on CUDA all have several."""
        device = device_of(dialect)
        pages = new_pages(backend_on(device, dialect), same(64), ["fp16"])
        queries = normal((1, 2, 1, 64), mx.float16, 1)
        made = []
        for slabs in (1, 3, 5, 9):
            for slab in range(len(pages.slabs), slabs):
                pages.map_slab(slab, 8, FP16)
            entries = tuple(slab * 8 for slab in range(slabs))
            metadata = AttentionMetadata((entries,), (slabs * 256 - 3,), (0,))
            pages.write(queries[:, :2], queries[:, :2], metadata)
            pages.attend(queries, metadata, Attention(1.0))
            made.append(set(device.texts))
        assert made[0] == made[1]
        assert made[2] == made[3]
        expected = {"metal": [2, 2, 4, 4], "cuda": [3, 3, 3, 3]}
        assert [len(texts) for texts in made] == expected[dialect]

    def test_pages_in_more_slabs_than_a_kernel_takes(self, dialect: str) -> None:
        backend = backend_on(device_of(dialect), dialect)
        pages = new_pages(backend, same(64), ["fp16"] * (MAX_SLABS + 1))
        table = tuple(slab * 8 for slab in range(MAX_SLABS + 1))
        metadata = AttentionMetadata((table,), (len(table) * 256,), (0,))
        few = AttentionMetadata((table[:2],), (300,), (0,))
        pages.gather(few)  # binds slabs that plain operations replace
        shape = (1, 2, len(table) * 256, 64)
        pages.write(normal(shape, mx.float16, 1), normal(shape, mx.float16, 2), metadata)
        batch = Batch(pages, metadata)
        assert batch.attend(1) <= TOLERANCES[mx.float16]
        assert batch.attend(3) <= TOLERANCES[mx.float16]
        assert backend.fallbacks == 3
        assert Batch(pages, few).attend(1) <= TOLERANCES[mx.float16]
        assert backend.fallbacks == 3

    def test_queries_of_another_dtype_that_lie_elsewhere(self, dialect: str) -> None:
        backend = backend_on(device_of(dialect), dialect)
        batch = written(backend, same(64), ["fp16"], [20])
        queries = normal((1, 2, 6, 64), mx.bfloat16, 1).transpose(0, 2, 1, 3)
        found = batch.pages.attend(queries, batch.metadata, Attention(0.125))
        other = batch.pages.attend(mx.contiguous(queries), batch.metadata, Attention(0.125))
        assert found.dtype == mx.bfloat16
        assert mx.array_equal(found, other)

    def test_no_step_is_written_to_a_quantised_page(self, dialect: str) -> None:
        """Neither by a kernel that writes, nor by one that also attends."""
        pages = new_pages(backend_on(device_of(dialect), dialect), same(64), ["fp16", "q8"])
        step = normal((1, 2, 2, 64), mx.float16, 1)
        metadata = AttentionMetadata(((0, 8),), (258,), (0,))
        with pytest.raises(QuantisedPage):
            pages.write(step, step, metadata)
        pages.write_later(step[:, :, :1], step[:, :, :1], metadata)
        with pytest.raises(QuantisedPage):
            pages.attend(step[:, :, :1], metadata, Attention(1.0))

    @pytest.mark.soak
    def test_the_doctor_finds_these_kernels_right(
        self, dialect: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        device = device_of(dialect, checked=False)
        monkeypatch.setattr(examination, "device_backend", lambda: backend_on(device, dialect))
        assert main(["doctor", "--again"]) == 0
        assert f"backend: {dialect}" in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["fp16", "q4"])
    def test_models_give_the_same_tokens(
        self, dialect: str, name: FormatName, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whole models through caches, pools and these kernels, across the edge of a page and of a
        window, and with heads of 512 in full layers, as Gemma 4 has them; against plain operations.
        """
        model: Any = small_model("gemma4_text", head_dim=64, global_head_dim=512)
        model.set_dtype(mx.float16)
        prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(252)]
        device = device_of(dialect, checked=False)
        runs = []
        for make in (lambda: backend_on(device, dialect), Backend):
            monkeypatch.setitem(backend_module.BACKENDS, "plain", make)
            monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
            factory = PagedCacheFactory(model, max_bytes=64 << 20, page_format=name)
            runs.append(greedy(model, prompt, factory.make_cache(), 8, 128))
            assert factory.stats().gather_fallbacks == 0
            factory.close()
        assert_same_run(runs[0], runs[1], RANDOM_TOLERANCE)
        launched = {launch.name for launch in device.launches if "512_512" in launch.name}
        assert {each.split("_")[2] for each in launched} >= {"write", "decode", "prefill"}


@needs_compiler
@pytest.mark.slow
def test_checks_of_the_doctor_have_groups_of_sequences() -> None:
    device = device_of("metal", checked=False)
    kinds = ("decode", "prefill", "latent decode")
    tried = {f"{kind} behind shared pages fp16 float16" for kind in kinds}
    for check in checks(backend_on(device, "metal")):
        if check.name in tried:
            assert check.run() <= check.tolerance
            tried.remove(check.name)
    assert not tried
    names = {launch.name for launch in device.launches}
    for operation in ("decode_after_prefix", "prefill_after_prefix", "latent_after_prefix"):
        assert any(operation in name for name in names)
    for operation in ("prefill", "latent"):
        assert any(operation in name and "in_groups" in name for name in names)


def test_every_check_of_the_doctor_can_fail() -> None:
    """The tolerances are narrow enough: writes of zeros fail all of these tests."""

    class Nothing(Backend):
        def write(
            self, pages: Any, keys: mx.array, values: mx.array, metadata: AttentionMetadata
        ) -> None:
            super().write(pages, 0 * keys, 0 * values, metadata)

        def gather(self, *arguments: Any) -> Any:
            return tuple(part + 1 for part in super().gather(*arguments))

        def copy(self, pages: Any, copies: Any) -> None:
            pass

    for check in checks(Nothing()):
        is_read = check.name.startswith(("decode", "prefill", "latent decode"))
        if not is_read and check.name.endswith(" float16"):
            error = check.run()
            assert not error <= check.tolerance or np.isnan(error), check.name


def _decodes() -> Iterator[tuple[tuple[int, int], int, int]]:
    dims = [*product(HEAD_SIZES, HEAD_SIZES), (512, 512)]
    yield from product(dims, (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 64), (1, 2))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_threadgroup_of_decode_has_the_memory_that_it_may(dialect: str) -> None:
    """Queries in each basis, and for each simdgroup a tile's weights or a head's values."""
    for (k_dim, v_dim), gqa_group_size, bases in _decodes():
        shape = gpu_tuning.decode_shape(
            dialect, 1, gqa_group_size, 1, (k_dim, v_dim), 1000, bases=bases
        )
        own = max(gpu_tuning.TILE * shape.rows, v_dim) + shape.rows * 2
        queries = shape.blocks * shape.rows * k_dim * bases
        assert 4 * (shape.blocks * shape.parts * own + queries) <= SHARED["metal"]
        assert shape.rows * -(-v_dim // gpu_tuning.LANES) <= gpu_tuning.MOST_SUMS
        assert gpu_tuning.TILE % gpu_tuning.values_ahead(dialect, v_dim) == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_heads_of_512_share_columns(dialect: str) -> None:
    sharers = {dim: gpu_tuning.column_sharers(dialect, dim) for dim in (*HEAD_SIZES, 512)}
    assert sharers == {**dict.fromkeys(HEAD_SIZES, 1), 512: 2}
    assert gpu_tuning.group_threads(dialect, 512, 512) == gpu_tuning.prefill_threads(dialect, 512)
    threads = gpu_tuning.prefill_threads(dialect, 512)
    assert gpu_tuning.matrix_rows(dialect, threads, 2) == gpu_tuning.GROUP_ROWS


def test_parts_fill_waves() -> None:
    """A part for each of 1,280 simdgroups would fill two thirds of a wave of 2,048."""
    parts = {each: gpu_tuning.parts_in_waves(2048, each) for each in (64, 1280, 2560, 4096, 9000)}
    assert parts == {64: 32, 1280: 3, 2560: 3, 4096: 1, 9000: 1}
