"""Implements mlx-lm's cache protocol for layers that attend by chunks."""

from __future__ import annotations

from paged_kv.cache.paged_kv_cache import PagedKVCache


class PagedChunkedKVCache(PagedKVCache):
    """One layer of some sequences, with the members of mlx-lm's `ChunkedKVCache`.

    The pages are a ring that holds a chunk's length of tokens. The model makes the mask from
    `start_position` and `offset`, two numbers, so it takes one sequence of a batch at a time.
    """

    @property
    def start_position(self) -> int:
        """The position of the first token that `update_and_fetch` will return.

        Raises:
            ValueError: the cache holds several sequences, each with a position of its own.
        """
        if len(self.sequences) != 1:
            raise ValueError(
                f"a layer that attends by chunks takes one sequence, this cache has "
                f"{len(self.sequences)}: give each sequence a cache of its own"
            )
        window = self.pool.group_of(self.layer).window
        before = self.sequences[0].progress(self.layer).offset
        return 0 if window is None else window.first_visible(before)

    def maybe_trim_front(self) -> None:
        """Does nothing: the ring overwrites the tokens that its window has passed."""
