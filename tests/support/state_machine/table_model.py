"""A model whose layers write keys and values from a table, and ask queries from it: nothing that it
computes feeds back.

They follow from the token, its position and the layer. So what a page must hold is known in every
format, bit for bit. With layers that compute on each other's results an error of a quantised page
would grow from layer to layer, and hide wrong pages.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from paged_kv.kernels.pages.number_format import VALUE_FORMATS

Floats = npt.NDArray[np.float32]

ROWS, DIM, KV_HEADS, Q_HEADS = 997, 32, 2, 4
# Large enough to see single tokens among hundreds.
SCALE = 2 * DIM**-0.5
DECAY = 0.9
TABLE: Floats = np.random.default_rng(7).standard_normal((ROWS, DIM), dtype=np.float32)


def query_rows(tokens: Any, positions: Any, layer: int, head: int) -> Any:
    """The rows of the table that the queries of tokens use in one head; the next two functions do
    the same for keys and values."""
    return (tokens * 3 + positions * 11 + layer * 29 + head * 307 + 2) % ROWS


def key_rows(tokens: Any, positions: Any, layer: int, head: int) -> Any:
    return (tokens * 7 + positions * 3 + layer * 31 + head * 101) % ROWS


def value_rows(tokens: Any, positions: Any, layer: int, head: int) -> Any:
    return (tokens * 5 + positions + layer * 17 + head * 211 + 1) % ROWS


def state_rows(tokens: Any) -> Any:
    """The rows that tokens add to the state."""
    return (tokens * 13 + 5) % ROWS


@cache
def table_after(formats: tuple[str, ...]) -> Floats:
    """The table after a round trip through these number formats, one after the other, without a
    centre."""
    numbers = mx.array(TABLE)
    for name in formats:
        held = VALUE_FORMATS[name]
        numbers = held.decode(held.encode(numbers), mx.float32)
    return np.array(numbers)


class TableModel(Module):
    """Args:
    windows: what each layer with keys and values sees; None for everything.
    has_states: whether there is a recurrent layer too: the sum of what was, which decays.
    """

    def __init__(self, windows: tuple[int | None, ...], has_states: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX has no types
        self.table = mx.array(TABLE)
        self.windows = list(windows)
        self.has_states = has_states

    def make_cache(self) -> list[Any]:
        states = [ArraysCache(size=1)] if self.has_states else []
        return [
            KVCache() if window is None else RotatingKVCache(max_size=window)
            for window in self.windows
        ] + states

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """For tokens [B, S], the attention outputs of each layer, [B, S, layers * Q_HEADS * DIM],
        and the state."""
        held = list(zip(self.windows, cache, strict=False))
        # Before any layer changes, as in all models.
        masks = [
            base.create_attention_mask(inputs, layer_cache, window_size=window)
            for window, layer_cache in held
        ]
        seen = [
            self._attend(inputs, layer, layer_cache, mask)
            for layer, ((_, layer_cache), mask) in enumerate(zip(held, masks, strict=True))
        ]
        states = [self._states(inputs, cache[-1])] if self.has_states else []
        return mx.concatenate(seen + states, axis=-1)

    def _attend(self, tokens: mx.array, layer: int, cache: Any, mask: Any) -> mx.array:
        offset = cache.offset
        first = offset[:, None] if isinstance(offset, mx.array) else offset
        at = mx.arange(tokens.shape[1])[None] + first

        def rows(choose: Any, heads: int) -> mx.array:
            return mx.stack([self.table[choose(tokens, at, layer, h)] for h in range(heads)], 1)

        keys, values = cache.update_and_fetch(rows(key_rows, KV_HEADS), rows(value_rows, KV_HEADS))
        seen = base.scaled_dot_product_attention(
            rows(query_rows, Q_HEADS), keys, values, cache=cache, scale=SCALE, mask=mask
        )
        return seen.transpose(0, 2, 1, 3).reshape(*tokens.shape, -1)

    def _states(self, tokens: mx.array, cache: ArraysCache) -> mx.array:
        batch, count = tokens.shape
        mask = base.create_ssm_mask(tokens, cache)
        own = mx.ones((batch, count)) if mask is None else mask.astype(mx.float32)
        age = mx.cumsum(own, axis=1)
        weights = mx.tril(DECAY ** mx.maximum(age[:, :, None] - age[:, None], 0)) * own[:, None]
        start = mx.zeros((batch, DIM)) if cache[0] is None else cache[0]
        states = DECAY ** age[..., None] * start[:, None] + weights @ self.table[state_rows(tokens)]
        cache[0] = states[:, -1]
        cache.advance(count)
        return states
