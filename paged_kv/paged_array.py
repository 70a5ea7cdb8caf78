"""Arrays that stand for pages.

mlx-lm's models take what a cache returns for arrays and pass it on to attention. These are
arrays: lazily gathered keys and values, computed only if somebody looks at them. They also say
which pages they stand for, so that attention can read the pages instead.
"""

from collections.abc import Callable

import mlx.core as mx

from paged_kv.kernels.attention_mask import causal_window_mask
from paged_kv.kernels.layer_pages import LayerPages
from paged_kv.kernels.page_rows import PageRows


class PagedRead:
    """All keys and values of one layer at one moment, as pages.

    Args:
        pages: the layer's pages.
        rows: which of them, and how many tokens.
        on_gather: called once, when this is dropped, if attention never read the pages.
    """

    def __init__(self, pages: LayerPages, rows: PageRows, on_gather: Callable[[], None]) -> None:
        self.rows = rows
        self._pages = pages
        self._on_gather = on_gather
        self._attended = False

    def __del__(self) -> None:
        if not self._attended:
            self._on_gather()

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        causal: bool,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of queries [B, q_heads, S, k_dim] over the pages; see `Backend.attend`."""
        self._attended = True
        return self._pages.attend(
            queries, self.rows, scale=scale, causal=causal, window=window, sinks=sinks
        )


class PagedKeys(mx.array):
    """Keys [B, k_heads, T, k_dim] of all tokens so far, gathered when looked at."""

    read: PagedRead


class PagedValues(mx.array):
    """Values [B, v_heads, T, v_dim] of all tokens so far, gathered when looked at."""

    read: PagedRead


class PagedMask(mx.array):
    """A causal mask that a cache made, boolean [S, T], computed when looked at.

    Attributes:
        context_lens: tokens of each row, those of this step included.
        window: how many tokens a query sees, itself included; None for all.
    """

    context_lens: tuple[int, ...]
    window: int | None


def paged_arrays(
    pages: LayerPages, rows: PageRows, on_gather: Callable[[], None]
) -> tuple[PagedKeys, PagedValues]:
    """The keys and values that stand for the pages of `rows`."""
    gathered_keys, gathered_values = pages.gather(rows)
    keys, values = PagedKeys(gathered_keys), PagedValues(gathered_values)
    keys.read = values.read = PagedRead(pages, rows, on_gather)
    return keys, values


def paged_mask(length: int, queries: int, window: int | None) -> PagedMask:
    """The mask of the last `queries` of `length` tokens."""
    mask = PagedMask(causal_window_mask(length, queries, window))
    mask.context_lens = (length,)
    mask.window = window
    return mask
