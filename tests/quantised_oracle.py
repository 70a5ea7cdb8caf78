"""A contiguous mlx-lm cache with the numbers that quantised pages should hold.

It shares only the number formats with paged_kv, which have tests of their own: no pages, tables,
rings or kernels. Windows are masks over all tokens.
"""

from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from paged_kv.kernels.pages.page_format import FormatName, PageFormat, page_format_named

# mlx-lm has a py.typed, but its caches have no types: mypy takes a subclass for Any.
_Cache: Any = KVCache


class QuantisedOracle(_Cache):  # type: ignore[misc]
    """Encodes and decodes every token's keys and values as soon as they arrive.

    Args:
        page_format: of the tokens to come.
        longest_written: a longer step is attended to before it is quantised, as in a ring.

    Attributes:
        formats: of each token, by name.
    """

    def __init__(self, page_format: FormatName, longest_written: int | None = None) -> None:
        super().__init__()
        self.page_format = page_format_named(page_format)
        self.longest_written = longest_written
        self.formats: list[str] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.settle()
        start, count = self.offset, keys.shape[2]
        self.formats += ["unwritten"] * count
        super().update_and_fetch(keys, values)
        if self.longest_written is None or count <= self.longest_written:
            self.hold(range(start, self.offset), self.page_format)
        held: tuple[mx.array, mx.array] = self.keys_and_values()
        return held

    def settle(self) -> None:
        """Quantise a long step after its queries have attended."""
        waiting = [at for at, name in enumerate(self.formats) if name == "unwritten"]
        if waiting:
            self.hold(range(waiting[0], waiting[-1] + 1), self.page_format)

    def hold(self, tokens: range, page_format: PageFormat) -> None:
        """Convert some of the tokens into that format."""
        if not tokens:
            return
        part = slice(tokens.start, tokens.stop)
        for array, each in ((self.keys, page_format.keys), (self.values, page_format.values)):
            numbers = array[:, :, part]
            array[:, :, part] = each.decode(each.encode(numbers), numbers.dtype)
        self.formats[part] = [page_format.name] * len(tokens)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> "QuantisedOracle":
        self.settle()
        page_format = page_format_named(f"q{bits}")
        at = 0
        for name, alike in groupby(list(self.formats)):
            tokens = range(at, at + len(list(alike)))
            at = tokens.stop
            if name != page_format.name:
                self.hold(tokens, page_format)
        self.page_format = page_format
        return self

    def trim(self, n: int) -> int:
        self.settle()
        trimmed: int = super().trim(n)
        del self.formats[self.offset :]
        return trimmed

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is None:
            return super().make_mask(N, return_array=return_array, window_size=None)
        return create_causal_mask(N, self.offset, window_size)


def oracle_caches(model: Module, page_format: FormatName = "fp16") -> list[QuantisedOracle]:
    """A cache for each layer of a model whose layers all have keys and values."""
    return [
        QuantisedOracle(
            page_format, min(256, stock.max_size) if isinstance(stock, RotatingKVCache) else None
        )
        for stock in make_prompt_cache(model)
    ]
