"""A batch as the kernels see it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageRows:
    """Where the tokens of each row of a batch are.

    The rows of a step have S tokens each, but some of those may be padding, which no page holds:
    the step ends `right_padding` tokens behind a row's last token, and what lies before a row's
    first token is padding too. So token i of the step is at position
    context_len + right_padding - S + i of its row, and is padding if the row has no such position.

    Attributes:
        block_tables: per row the entries of its blocks, in the order of their tokens. Position p
            is row p % 256 of the page that entry p // 256 names.
        context_lens: per row how many tokens are in its pages, those of this step included.
        right_padding: per row how many tokens of padding follow the last one.
    """

    block_tables: tuple[tuple[int, ...], ...]
    context_lens: tuple[int, ...]
    right_padding: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Per row the tokens and the padding behind them."""
        return tuple(map(sum, zip(self.context_lens, self.right_padding, strict=True)))

    def own_tokens(self, count: int) -> list[range]:
        """Which of a step's `count` tokens are not padding, for each row."""
        return [
            range(max(0, count - end), max(0, count - padding))
            for end, padding in zip(self.ends, self.right_padding, strict=True)
        ]
