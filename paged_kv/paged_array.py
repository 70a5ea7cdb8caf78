"""Arrays that stand for pages.

mlx-lm's models take what a cache returns for arrays and pass it on to attention. These are
arrays: lazily gathered keys and values, computed only if somebody looks at them. They also say
which pages they stand for, so that attention can read the pages instead.
"""

from collections.abc import Callable
from threading import RLock, current_thread

import mlx.core as mx

from paged_kv.kernels.attention_mask import batch_mask, causal_window_mask
from paged_kv.kernels.layer_pages import LayerPages
from paged_kv.kernels.page_rows import PageRows, Tail
from paged_kv.window import Window


class PagedRead:
    """All keys and values of one layer at one moment, as pages.

    Args:
        pages: the layer's pages.
        rows: which of them, and how many tokens.
        window: what the layer sees; None if all.
        tail: the latest step, if no page holds it yet.
        lock: keeps pages from being moved while it is held.
        relocate: gives the rows with the blocks where their tokens are now, or None if the
            sequences have changed since.
        on_gather: called once, when this is dropped, if attention never read the pages.
    """

    def __init__(
        self,
        pages: LayerPages,
        rows: PageRows,
        window: Window | None,
        tail: Tail | None,
        lock: RLock,
        relocate: Callable[[], PageRows | None],
        on_gather: Callable[[], None],
    ) -> None:
        self.pages = pages
        self.rows = rows
        self.gathered: tuple[mx.array, ...] = ()
        self.lock = lock
        self._window = window
        self._tail = tail
        self._relocate = relocate
        self._on_gather = on_gather
        self._attended = False
        self._moves = pages.moves
        self._thread = current_thread()

    def __del__(self) -> None:
        if not self._attended:
            # A graph may still hold the gathered arrays, and be computed later.
            self.pages.lazy_reads.leave(self.gathered, self.rows, self._thread)
            self._on_gather()

    def sees_as(self, mask: mx.array | str | None, queries: int) -> bool:
        """Whether a kernel that knows only lengths and a window hides what the mask hides, and the
        pages still hold these tokens. Hold the lock until `attend` is over: other threads may
        move pages."""
        if not self._follow_moves():
            return False
        if self._window is not None and self._window.keep:
            return not self._hides_any and not isinstance(mask, mx.array)
        if isinstance(mask, PagedMask):
            return mask.hides_in(self.rows, queries) and self._is_narrower(mask.window)
        if mask is None:
            return self._window is None or queries == 1
        if isinstance(mask, mx.array) or mask != "causal":
            return False
        return self._window is None or max(self.rows.visible_lens) <= self._window.size

    def attend(
        self,
        queries: mx.array,
        mask: mx.array | str | None,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of a step of queries [B, q_heads, S, k_dim] under a mask that `sees_as` this;
        see `Backend.attend`."""
        self._attended = True
        window = self._window.size if self._window and not self._window.keep else None
        if isinstance(mask, PagedMask) and mask.window is not None:
            window = mask.window
        return self.pages.attend(
            queries,
            self.rows,
            scale=scale,
            causal=mask is not None,
            window=window,
            sinks=sinks,
            tail=self._tail,
        )

    def _follow_moves(self) -> bool:
        """Whether the rows name the blocks that hold the tokens now."""
        if self.pages.moves != self._moves:
            rows = self._relocate()
            if rows is None:
                return False
            self.rows, self._moves = rows, self.pages.moves
        return True

    @property
    def _hides_any(self) -> bool:
        """Whether a query behind a head does not see all tokens."""
        assert self._window is not None
        longest = self._window.size + self._window.keep
        return any(self.rows.first_tokens) or max(self.rows.visible_lens) > longest

    def _is_narrower(self, window: int | None) -> bool:
        if self._window is None:
            return True
        return window is not None and window <= self._window.size


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
        visible_lens: tokens of each row, those of this step included.
        right_padding: tokens of padding behind those, as in `PageRows`.
        window: how many tokens a query sees, itself included; None for all.
    """

    visible_lens: tuple[int, ...]
    right_padding: tuple[int, ...]
    window: int | None

    def hides_in(self, rows: PageRows, queries: int) -> bool:
        """Whether this is the mask of a step of `queries` tokens that ends as `rows` do."""
        ends_alike = (self.visible_lens, self.right_padding) == (
            rows.visible_lens,
            rows.right_padding,
        )
        return ends_alike and self.shape[-2] == queries


def paged_arrays(
    read: PagedRead, gathered: tuple[mx.array, mx.array]
) -> tuple[PagedKeys, PagedValues]:
    """The keys and values that stand for the pages of a read; `gathered` is what they are when
    looked at."""
    read.gathered = gathered
    keys, values = PagedKeys(gathered[0]), PagedValues(gathered[1])
    keys.read = values.read = read
    read.pages.lazy_reads.watch((keys, values), read.rows)
    return keys, values


def paged_mask(rows: PageRows, queries: int, window: int | None, keep: int = 0) -> PagedMask:
    """The mask of a step of `queries` tokens; of `rows` the block tables do not matter."""
    if len(rows.ends) == 1:
        mask = PagedMask(causal_window_mask(rows.ends[0], queries, window, keep))
    else:
        mask = PagedMask(batch_mask(rows, queries, window, keep))
    mask.visible_lens = rows.visible_lens
    mask.right_padding = rows.right_padding
    mask.window = window
    return mask
