"""What recorded steps of plain operations give is what steps by numbers give."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.backend import Backend, StepRecorder
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FormatName, LayerGeometry
from paged_kv.kernels.pages.tables import Tables, tables_of
from tests.support.arrays import normal
from tests.support.gpu_pages import STRIDE, new_pages

# Full pages come from the later slabs, in turns; pages that are written from the first.
LENGTHS = (300, 1, 256, 600)
PLAIN = LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32)
FORMATS: tuple[list[FormatName], ...] = (["fp16"], ["fp16", "q8"], ["fp16", "q4", "fp16"])


def _filled(formats: list[FormatName], geometry: LayerGeometry) -> LayerPages:
    pages = new_pages(Backend(), geometry, ["fp16", *formats])
    for number in range(1, len(formats) + 1):
        for page in range(3):
            at = 10 * number + page
            keys = normal((1, geometry.k_heads, 256, geometry.k_dim), geometry.k_dtype, at)
            values = normal((1, geometry.v_heads, 256, geometry.v_dim), geometry.v_dtype, at)
            pages.write(keys, values, AttentionMetadata(((7,),), (256,), (0,)))
            pages.copy({7: number * STRIDE + page})
    return pages


def _metadata(count: int, lengths: tuple[int, ...] = LENGTHS) -> AttentionMetadata:
    tables = []
    for row, length in enumerate(lengths):
        full = (length - 1) // 256
        earlier = [(1 + at % count) * STRIDE + (row + at) % 3 for at in range(full)]
        tables.append((*earlier, row))
    return AttentionMetadata(tuple(tables), lengths, (0,) * len(lengths))


def _with_own_pages(formats: list[FormatName], geometry: LayerGeometry, count: int) -> LayerPages:
    """Filled pages, and what each row's last page holds so far."""
    pages = _filled(formats, geometry)
    for row in range(len(LENGTHS)):
        tokens = normal((1, geometry.k_heads, count, geometry.k_dim), mx.float32, row)
        metadata = AttentionMetadata(((row,),), (count,), (0,))
        pages.write(tokens, -tokens[..., : geometry.v_dim], metadata)
    return pages


def _recorded(pages: LayerPages, metadata: AttentionMetadata) -> tuple[StepRecorder, Tables, Any]:
    recorder, tables = StepRecorder(), tables_of(metadata, STRIDE)
    placeholder = pages.like(recorder.backend)
    recorder.set_arrays(placeholder, pages, tables, recorder.arrays(pages, tables))
    return recorder, tables, placeholder


def assert_step_is_the_same(
    formats: list[FormatName],
    geometry: LayerGeometry,
    metadata: AttentionMetadata,
    attention: Attention,
    *,
    held: int = 256,
) -> mx.array:
    """A step writes and attends as without a recorder; returns its output."""
    one, other = (_with_own_pages(formats, geometry, held) for _ in range(2))
    step = normal((4, 2, 1, 32), mx.float32, 5), normal((4, 2, 1, 32), mx.float32, 6)
    queries = normal((4, 4, 1, 32), mx.float32, 7)
    one.write(*step, metadata)
    expected = one.attend(queries, metadata, attention)
    recorder, tables, placeholder = _recorded(other, metadata)
    placeholder.write_later(*step, metadata)
    got: mx.array = placeholder.attend(queries, metadata, attention)
    assert mx.allclose(got, expected, atol=1e-5)
    changed = recorder.changed(placeholder, tables)
    assert len(changed) == recorder.changes(tables)
    filled = metadata.filled_entries(1) if geometry.has_summaries else []
    recorder.keep(other, tables, changed, filled)
    for number, slab in one.slabs.items():
        assert mx.array_equal(slab.memory, other.slabs[number].memory)
    return got


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"window": 290}, {"softcap": 2.0, "window": 3}, {"sinks": 1}],
    ids=str,
)
def test_writing_and_attending(formats: list[FormatName], options: dict[str, Any]) -> None:
    if "sinks" in options:
        options = {"sinks": normal((4,), mx.float32, 8)}
    attention = Attention(0.2, **options)
    assert_step_is_the_same(formats, PLAIN, _metadata(len(formats)), attention)


def test_tokens_that_a_window_has_passed() -> None:
    pages = _with_own_pages(["fp16"], PLAIN, 256)
    metadata = AttentionMetadata(((8, 0), (9, 1)), (300, 310), (0, 0), (100, 0))
    queries, attention = normal((2, 4, 1, 32), mx.float32, 7), Attention(0.2, window=200)
    expected = pages.attend(queries, metadata, attention)
    _, _, placeholder = _recorded(pages, metadata)
    assert mx.allclose(placeholder.attend(queries, metadata, attention), expected, atol=1e-5)
