"""Where sequences of a batch begin when a window has passed some of their tokens."""

import mlx.core as mx
import pytest

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry, page_format_named
from tests.support.arrays import normal
from tests.support.backends import BACKENDS, backend_named

GEOMETRY = LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_one_length_begin_where_each_of_them_does(backend: str) -> None:
    """Their windows have passed different numbers of tokens, but their pages have the same
    format."""
    pages = LayerPages(GEOMETRY, backend_named(backend, GEOMETRY), 64)
    pages.map_slab(0, 4, page_format_named("fp16"))
    tables, lengths, firsts = ((0, 1), (2, 3)), (300, 280), (40, 20)
    written = [normal((1, 2, length, 32), mx.float32, length) for length in lengths]
    for table, length, keys in zip(tables, lengths, written, strict=True):
        pages.write(keys, keys + 1, AttentionMetadata((table,), (length,), (0,)))
    found, _ = pages.gather(AttentionMetadata(tables, lengths, (0, 0), firsts))
    for row, (keys, first) in enumerate(zip(written, firsts, strict=True)):
        assert mx.array_equal(found[row], keys[0, :, first:])
