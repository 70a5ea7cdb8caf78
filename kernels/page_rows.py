"""A batch as the kernels see it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageRows:
    """Where the tokens of each row of a batch are.

    Attributes:
        block_tables: per row the entries of its blocks, in the order of their tokens. Position p
            is row p % 256 of the page that entry p // 256 names.
        context_lens: per row how many tokens are in its pages.
    """

    block_tables: tuple[tuple[int, ...], ...]
    context_lens: tuple[int, ...]
