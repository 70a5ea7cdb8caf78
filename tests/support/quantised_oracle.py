"""A contiguous mlx-lm cache with the numbers that quantised pages should hold.

It shares only the number formats with paged_kv, which have tests of their own: no tables, rings or
kernels. Windows are masks over all tokens.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache
from paged_kv.kernels.pages.page_format import FormatName, PageFormat, page_format_named

PAGE = 256
FP16 = page_format_named("fp16")

# mlx-lm has a py.typed, but its caches have no types: mypy takes a subclass for Any.
_Cache: Any = KVCache


class QuantisedOracle(_Cache):  # type: ignore[misc]
    """Holds what pages hold after each step: the pages that a step begins and ends in have 16 bits
    until the next step begins, and the others are decoded again once they are full.

    Args:
        page_format: of full pages.
        is_ring: whether pages are written over, so that they keep 16 bits.

    Attributes:
        formats: of the pages that have not 16 bits.
    """

    def __init__(self, page_format: FormatName, *, is_ring: bool = False) -> None:
        super().__init__()
        self.page_format = FP16 if is_ring else page_format_named(page_format)
        self.is_ring = is_ring
        self.formats: dict[int, PageFormat] = {}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, written = self.offset, range(-(-(self.offset + keys.shape[2]) // PAGE))
        if keys.shape[2]:
            for page in range(start // PAGE):
                if page not in self.formats:
                    self.hold(page, self.full_format(page))
            self.formats.pop(start // PAGE, None)
        super().update_and_fetch(keys, values)
        for page in written[-(-start // PAGE) : -1]:
            self.hold(page, self.full_format(page))
        held: tuple[mx.array, mx.array] = self.keys_and_values()
        return held

    def format_of(self, page: int) -> str:
        """The name of a page's format."""
        return self.formats.get(page, FP16).name

    def full_format(self, page: int) -> PageFormat:
        """The format of a page once it is full."""
        return self.page_format if page else self.page_format.first

    def hold(self, page: int, page_format: PageFormat) -> None:
        """Turn a page's tokens into that format."""
        part = slice(page * PAGE, min(self.offset, (page + 1) * PAGE))
        for array, each in ((self.keys, page_format.keys), (self.values, page_format.values)):
            rows = array[:, :, part]
            array[:, :, part] = each.decode(each.encode(rows), rows.dtype)
        self.formats[page] = page_format
        if page_format == FP16:
            del self.formats[page]

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> "QuantisedOracle":
        page_format = page_format_named(f"q{bits}")
        if self.is_ring:
            return self
        if page_format != self.page_format:
            self.page_format = page_format
            for page in range(self.offset // PAGE):
                if self.formats.get(page) != self.full_format(page):
                    self.hold(page, self.full_format(page))
        return self

    def trim(self, n: int) -> int:
        trimmed: int = super().trim(n)
        for page in [page for page in self.formats if page * PAGE >= self.offset]:
            del self.formats[page]
        return trimmed

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is None:
            return super().make_mask(N, return_array=return_array, window_size=None)
        return create_causal_mask(N, self.offset, window_size)


def oracle_caches(model: Module, page_format: FormatName = "fp16") -> list[Any]:
    """mlx-lm's prompt cache, with an oracle in the place of each cache that pages replace."""
    paged = PagedCacheFactory(model).make_cache()
    pairs = zip(make_prompt_cache(model), paged, strict=True)
    return [_oracle(stock, each, page_format) for stock, each in pairs]


def _oracle(stock: Any, paged: Any, page_format: FormatName) -> Any:
    if isinstance(paged, CacheList):
        pairs = zip(stock.caches, paged.caches, strict=True)
        return CacheList(*[_oracle(*pair, page_format) for pair in pairs])
    if not isinstance(paged, PagedKVCache):
        return stock
    return QuantisedOracle(page_format, is_ring=isinstance(stock, RotatingKVCache))
