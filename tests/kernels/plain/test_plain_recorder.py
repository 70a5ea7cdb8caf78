"""Plain operations that find tokens by arrays give what those give that find them by numbers."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FormatName
from paged_kv.kernels.pages.tables import tables_of
from paged_kv.kernels.plain.plain_backend import PlainBackend
from paged_kv.kernels.plain.plain_recorder import PlainRecorder
from tests.support.arrays import normal
from tests.support.gpu_pages import STRIDE, new_pages

# Full pages come from the later slabs, in turns; pages that are written from the first.
LENGTHS = (300, 1, 256, 600)
FORMATS: tuple[list[FormatName], ...] = (["fp16"], ["fp16", "q8"], ["fp16", "q4", "fp16"])


def _filled(formats: list[FormatName], geometry: LayerGeometry) -> LayerPages:
    pages = new_pages(PlainBackend(), geometry, ["fp16", *formats])
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


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"window": 290},
        {"softcap": 2.0},
        {"softcap": 2.0, "window": 3},
        {"sinks": 1},
    ],
    ids=str,
)
def test_writing_and_attending(formats: list[FormatName], options: dict[str, Any]) -> None:
    geometry = LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32)
    one, other = (_filled(formats, geometry) for _ in range(2))
    for pages in (one, other):  # what each row's last page holds so far
        for row in range(len(LENGTHS)):
            tokens = normal((1, 2, 256, 32), mx.float32, row)
            pages.write(tokens, -tokens, AttentionMetadata(((row,),), (256,), (0,)))
    attention = Attention(0.2, **options)
    if "sinks" in options:
        attention = Attention(0.2, sinks=normal((4,), mx.float32, 8))
    step = normal((4, 2, 1, 32), mx.float32, 5), normal((4, 2, 1, 32), mx.float32, 6)
    queries = normal((4, 4, 1, 32), mx.float32, 7)
    metadata = _metadata(len(formats))
    one.write(*step, metadata)
    expected = one.attend(queries, metadata, attention)
    recorder, tables = PlainRecorder(), tables_of(metadata, STRIDE)
    stand_in = recorder.stand_in(other, tables, recorder.arrays(other, tables))
    stand_in.write_later(*step, metadata)
    got = stand_in.attend(queries, metadata, attention)
    assert mx.allclose(got, expected, atol=1e-5)
    changed = recorder.changed(stand_in, tables)
    assert len(changed) == recorder.changes(tables)
    recorder.keep(other, tables, changed, [])
    for number, slab in one.slabs.items():
        assert mx.array_equal(slab.memory, other.slabs[number].memory)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_choosing(formats: list[FormatName], options: dict[str, Any]) -> None:
    """Some rows have no more tokens than are read, one fills a page, and not all have summaries."""
    geometry = LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32, has_summaries=True)
    one, other = (_filled(formats, geometry) for _ in range(2))
    for pages in (one, other):
        for row in range(len(LENGTHS)):
            tokens = normal((1, 2, 255, 32), mx.float32, row)
            pages.write(tokens, -tokens, AttentionMetadata(((row,),), (255,), (0,)))
    step = normal((4, 2, 1, 32), mx.float32, 5), normal((4, 2, 1, 32), mx.float32, 6)
    queries = normal((4, 6, 1, 32), mx.float32, 7)
    lengths = (700, 1, 512, 320)
    metadata = _metadata(len(formats), lengths)
    attention = Attention(0.3, read_tokens=450, **options)
    one.write(*step, metadata)
    expected = one.attend(queries, metadata, attention)
    recorder, tables = PlainRecorder(), tables_of(metadata, STRIDE)
    stand_in = recorder.stand_in(other, tables, recorder.arrays(other, tables))
    stand_in.write_later(*step, metadata)
    got = stand_in.attend(queries, metadata, attention)
    assert mx.allclose(got, expected, atol=1e-5)
    assert not mx.allclose(got, one.attend(queries, metadata, Attention(0.3, **options)), atol=1e-3)
    recorder.keep(other, tables, recorder.changed(stand_in, tables), metadata.filled_entries(1))
    for number, slab in one.slabs.items():
        assert mx.array_equal(slab.memory, other.slabs[number].memory)


def test_latents() -> None:
    geometry = LayerGeometry(1, 64, mx.float32, 1, 32, mx.float32)
    pages = _filled(["fp16"], geometry)
    for row in range(len(LENGTHS)):
        tokens = normal((1, 1, 256, 64), mx.float32, row)
        pages.write(tokens, tokens[..., :32], AttentionMetadata(((row,),), (256,), (0,)))
    metadata, attention = _metadata(1), Attention(0.2)
    queries = normal((4, 4, 1, 64), mx.float32, 5), normal((4, 4, 1, 32), mx.float32, 6)
    expected = pages.attend_latent(*queries, metadata, attention)
    recorder, tables = PlainRecorder(), tables_of(metadata, STRIDE)
    stand_in = recorder.stand_in(pages, tables, recorder.arrays(pages, tables))
    assert mx.allclose(stand_in.attend_latent(*queries, metadata, attention), expected, atol=1e-5)


def test_tokens_that_a_window_has_passed() -> None:
    geometry = LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32)
    pages = _filled(["fp16"], geometry)
    for row in range(2):
        tokens = normal((1, 2, 256, 32), mx.float32, row)
        pages.write(tokens, tokens, AttentionMetadata(((row,),), (256,), (0,)))
    metadata = AttentionMetadata(((8, 0), (9, 1)), (300, 310), (0, 0), (100, 0))
    queries, attention = normal((2, 4, 1, 32), mx.float32, 7), Attention(0.2, window=200)
    expected = pages.attend(queries, metadata, attention)
    recorder, tables = PlainRecorder(), tables_of(metadata, STRIDE)
    stand_in = recorder.stand_in(pages, tables, recorder.arrays(pages, tables))
    assert mx.allclose(stand_in.attend(queries, metadata, attention), expected, atol=1e-5)
