"""Arrays that stand for pages.

mlx-lm's models take what a cache returns for arrays and pass it on to attention. These are
arrays: lazily gathered keys and values, computed only if somebody looks at them. They also say
which pages they stand for, so that attention can read the pages instead.
"""

from collections.abc import Callable
from threading import get_ident

import mlx.core as mx

from paged_kv.kernels.attention_mask import batch_mask, causal_window_mask
from paged_kv.kernels.layer_pages import LayerPages
from paged_kv.kernels.page_rows import PageRows


class PagedRead:
    """All keys and values of one layer at one moment, as pages.

    Args:
        pages: the layer's pages.
        rows: which of them, and how many tokens.
        gathered: keys and values as they are computed if somebody looks at them.
        on_gather: called once, when this is dropped, if attention never read the pages.
    """

    def __init__(
        self,
        pages: LayerPages,
        rows: PageRows,
        gathered: tuple[mx.array, mx.array],
        on_gather: Callable[[], None],
    ) -> None:
        self.rows = rows
        self._pages = pages
        self._gathered = gathered
        self._on_gather = on_gather
        self._attended = False
        self._thread = get_ident()

    def __del__(self) -> None:
        if not self._attended:
            # Who did not attend has them in a graph, which may be computed later.
            self._pages.lazy_reads.leave(self._gathered, self._thread)
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
        """Attention of a step of queries [B, q_heads, S, k_dim]; see `Backend.attend`."""
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
    """A causal mask that a cache made, computed when looked at.

    Boolean [S, T] for one sequence, [B, 1, S, T] for a batch.

    Attributes:
        context_lens: tokens of each row, those of this step included.
        right_padding: tokens of padding behind those, as in `PageRows`.
        window: how many tokens a query sees, itself included; None for all.
    """

    context_lens: tuple[int, ...]
    right_padding: tuple[int, ...]
    window: int | None

    def hides_in(self, rows: PageRows, queries: int) -> bool:
        """Whether this is the mask of a step of `queries` tokens that ends as `rows` do."""
        ends_alike = (self.context_lens, self.right_padding) == (
            rows.context_lens,
            rows.right_padding,
        )
        return ends_alike and self.shape[-2] == queries


def paged_arrays(
    pages: LayerPages, rows: PageRows, on_gather: Callable[[], None]
) -> tuple[PagedKeys, PagedValues]:
    """The keys and values that stand for the pages of `rows`."""
    gathered = pages.gather(rows)
    keys, values = PagedKeys(gathered[0]), PagedValues(gathered[1])
    keys.read = values.read = PagedRead(pages, rows, gathered, on_gather)
    pages.lazy_reads.watch(keys)
    pages.lazy_reads.watch(values)
    return keys, values


def paged_mask(rows: PageRows, queries: int, window: int | None) -> PagedMask:
    """The mask of a step of `queries` tokens; of `rows` the block tables do not matter."""
    if len(rows.context_lens) == 1:
        mask = PagedMask(causal_window_mask(rows.ends[0], queries, window))
    else:
        mask = PagedMask(batch_mask(rows, queries, window))
    mask.context_lens = rows.context_lens
    mask.right_padding = rows.right_padding
    mask.window = window
    return mask
