"""Batches of pages, as tests write them."""

from paged_kv.kernels.pages.page_rows import PageRows


def unpadded(block_tables: tuple[tuple[int, ...], ...], context_lens: tuple[int, ...]) -> PageRows:
    """Rows of which every step is all tokens."""
    return PageRows(block_tables, context_lens, (0,) * len(context_lens))
