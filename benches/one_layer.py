"""Pages of one layer for the benches of kernels: 8 key-value heads of 128 and 32 query heads."""

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry, page_format_named

KV_HEADS, DIM, QUERY_HEADS = 8, 128, 32
SCALE = DIM**-0.5
STRIDE = 1 << 16
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
# What results files hold of it.
GEOMETRY = {"kv_heads": KV_HEADS, "head_dim": DIM, "query_heads": QUERY_HEADS}


def normal(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    """Random numbers, which are there already."""
    array = mx.random.normal(shape).astype(dtype)
    mx.eval(array)
    return array


def new_pages(
    dtype: mx.Dtype = mx.float16, backend: Any = None, *, has_summaries: bool = False
) -> LayerPages:
    """No pages yet."""
    shape = KV_HEADS, DIM, dtype
    geometry = LayerGeometry(*shape, *shape, has_summaries)
    return LayerPages(geometry, backend or choose_backend(), STRIDE)


class Layer:
    """B rows of so many tokens in pages of one format, behind one another or shuffled.

    Attributes:
        pages: theirs, and `spare` more.
        tables: the block tables of the rows.
        written: entries of one row's pages of 16 bits, from which quantised pages are recoded.
        keys, values: of the rows, [B, KV_HEADS, tokens, DIM].
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        dtype: mx.Dtype = mx.float16,
        *,
        page_format: str = "fp16",
        spare: int = 0,
        shuffled: bool = False,
    ) -> None:
        self.batch, self.tokens, self.dtype = batch, tokens, dtype
        self.pages = new_pages(dtype)
        per_row = -(-(tokens + 1) // PAGE_SIZE)
        entries = list(range(batch * per_row))
        if shuffled:
            random.Random(0).shuffle(entries)
        self.pages.map_slab(0, len(entries) + spare, page_format_named(page_format))
        self.pages.map_slab(1, per_row, FP16)
        self.written = tuple(range(STRIDE, STRIDE + per_row))
        self.tables = tuple(
            tuple(entries[per_row * row : per_row * (row + 1)]) for row in range(batch)
        )
        self.keys = normal(batch, KV_HEADS, tokens, DIM, dtype=dtype)
        self.values = normal(batch, KV_HEADS, tokens, DIM, dtype=dtype)
        if page_format == "fp16":
            self.pages.write(self.keys, self.values, self.metadata(tokens))
            return
        for row, table in enumerate(self.tables):
            metadata = AttentionMetadata((self.written,), (tokens,), (0,))
            self.pages.write(self.keys[row : row + 1], self.values[row : row + 1], metadata)
            self.pages.copy(dict(zip(self.written, table, strict=True)))

    def metadata(self, tokens: int) -> AttentionMetadata:
        return AttentionMetadata(self.tables, (tokens,) * self.batch, (0,) * self.batch)

    def queries(self, count: int = 1) -> mx.array:
        return normal(self.batch, QUERY_HEADS, count, DIM, dtype=self.dtype)

    @property
    def kv_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def attend(self, queries: mx.array) -> Callable[[], None]:
        metadata = self.metadata(self.tokens)
        return lambda: mx.eval(self.pages.attend(queries, metadata, Attention(SCALE)))
