"""Prints the texts of a batch: one as it comes, and the next one when that is complete."""

from collections.abc import Sequence
from typing import Any


class TextsInTurn:
    """Texts whose tokens come in any order, on standard output in the order of their titles.

    Args:
        tokenizer: a tokenizer of mlx-lm.
        titles: of the texts; a single text is printed without its title.
    """

    def __init__(self, tokenizer: Any, titles: Sequence[str]) -> None:
        self._titles = titles
        self._detokenizers = [tokenizer.detokenizer for _ in titles]  # a new one each time
        self._complete = [False] * len(titles)
        self._turn = 0
        self._print_title()

    def add(self, number: int, token: int) -> None:
        """Take a text's next token."""
        self._detokenizers[number].add_token(token)
        if number == self._turn:
            self._print_new()

    def end(self, number: int) -> None:
        """Complete a text."""
        self._detokenizers[number].finalize()
        self._complete[number] = True
        while self._turn < len(self._titles) and self._complete[self._turn]:
            self._print_new()
            print(end="\n\n" if len(self._titles) > 1 else "\n")
            self._turn += 1
            if self._turn < len(self._titles):
                self._print_title()
                self._print_new()

    def _print_title(self) -> None:
        if len(self._titles) > 1:
            print(f"==> {self._titles[self._turn]} <==", flush=True)

    def _print_new(self) -> None:
        print(self._detokenizers[self._turn].last_segment, end="", flush=True)
