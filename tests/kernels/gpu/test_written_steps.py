"""The kernel that attends and also writes the step, on this CPU. How it attends is tried in
tests/kernels/gpu/test_kernels.py."""

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu import tuning as gpu_tuning
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.arrays import normal, numbers
from tests.support.gpu_pages import (
    DIALECTS,
    MIXED,
    TOLERANCES,
    Separately,
    backend_on,
    device_of,
    needs_compiler,
    new_pages,
    same,
    step_error,
    written,
)

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.parametrize("dialect", DIALECTS)]


@pytest.mark.parametrize("formats", [["fp16"], MIXED])
def test_contexts_of_several_parts(
    dialect: str, formats: list[FormatName], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tuning, "LEAST_TOKENS", dict.fromkeys(gpu_tuning.LEAST_TOKENS, 4))
    device = device_of(dialect, "shuffled")
    backend, options = backend_on(device, dialect), {"gqa_group_size": 9, "with_sinks": True}
    error = step_error(backend, same(64), formats, (150, 40), **options)
    assert error <= TOLERANCES[mx.float16]
    decodes = [launch for launch in device.launches if "_decode" in launch.name]
    assert all("_partial_" in launch.name for launch in decodes)


def test_padding_is_not_written_and_sees_nothing(dialect: str) -> None:
    """The second sequence's step is padding after its tokens, the third's is before its first."""
    backend = backend_on(device_of(dialect, "shuffled"), dialect)
    outputs, held = [], []
    for asked in (backend, Separately(backend)):
        batch = written(backend, same(64), ["fp16"], [30, 20, 0], more=True)
        metadata = AttentionMetadata(batch.metadata.block_tables, (31, 20, 0), (0, 2, 0))
        step = normal((3, 2, 1, 64), mx.float16, 1), normal((3, 2, 1, 64), mx.float16, 2)
        queries = normal((3, 4, 1, 64), mx.float16, 3)
        attention = Attention(0.125)
        outputs.append(asked.attend(batch.pages, queries, metadata, attention, step=step))
        held.append(batch.bytes())
    assert held[0] == held[1]
    assert mx.allclose(outputs[0], outputs[1], atol=1e-3)
    assert not numbers(outputs[0][1:]).any()


def test_a_ring_whose_oldest_page_is_also_its_newest(dialect: str) -> None:
    """The window begins in the tile that the step is written to, 256 tokens later."""
    backend = backend_on(device_of(dialect, "shuffled"), dialect)
    step = normal((1, 2, 1, 64), mx.float16, 1), normal((1, 2, 1, 64), mx.float16, 2)
    queries, outputs = normal((1, 4, 1, 64), mx.float16, 3), []
    for asked in (backend, Separately(backend)):
        pages = new_pages(backend, same(64), ["fp16"])
        tokens = normal((1, 2, 256, 64), mx.float16, 4)
        backend.write(pages, tokens, tokens, AttentionMetadata(((3,),), (256,), (0,)))
        metadata = AttentionMetadata(((3, 3),), (300,), (0,), (60,))
        attention = Attention(0.125, window=240)
        outputs.append(numbers(asked.attend(pages, queries, metadata, attention, step=step)))
    assert abs(outputs[0] - outputs[1]).max() <= 1e-3


def test_layers_that_differ_share_the_metadata_of_a_step(dialect: str) -> None:
    """The plan that is made once per step is made for all that it depends on."""
    backend = backend_on(device_of(dialect), dialect)
    batch = written(backend, same(64), ["fp16"], [100])
    queries, sinks = normal((1, 6, 1, 64), mx.float16, 1), mx.ones((6,))
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


def test_what_a_prompt_begins_with_is_not_gathered(dialect: str) -> None:
    """Of two rows; the second one is padded on both sides."""
    device = device_of(dialect)
    backend, outputs = backend_on(device, dialect), []
    step = normal((2, 2, 80, 64), mx.float16, 1), normal((2, 2, 80, 64), mx.float16, 2)
    queries, attention = normal((2, 4, 80, 64), mx.float16, 3), Attention(0.125)
    metadata = AttentionMetadata(((0,), (1,)), (80, 40), (0, 5))
    for asked in (backend, Separately(backend)):
        pages, before = new_pages(backend, same(64), ["fp16"]), len(device.launches)
        outputs.append(numbers(asked.attend(pages, queries, metadata, attention, step=step)))
        if asked is backend:
            names = [launch.name.split("_")[2] for launch in device.launches[before:]]
            assert names == (["write", "prefill"] if dialect == "metal" else ["write"])
    assert abs(outputs[0] - outputs[1]).max() <= 1e-3
    with_more = AttentionMetadata(((0,), (1,)), (80, 90), (0, 0))
    backend.attend(pages, queries, with_more, attention, step=step)
    assert device.launches[-1].name.split("_")[2] == ("prefill" if dialect == "metal" else "gather")


def test_how_many_launches_a_step_takes(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(dialect)
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
            backend.attend(batch.pages, queries, metadata, attention, step=step)
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
