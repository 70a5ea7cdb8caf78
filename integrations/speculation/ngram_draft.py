"""Prompt look-up: proposes what followed the same n tokens earlier.

It needs no second model. Answers that repeat their prompt, such as an edited file, or themselves,
are drafted from there.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from threading import Lock
from typing import NamedTuple

from paged_kv.checks import whole_number
from paged_kv.integrations.speculation.drafts import DraftRow
from paged_kv.lru import LRU

DEFAULT_NGRAM = 3


class NGramDraft:
    """Proposes what followed the same `n` tokens earlier: in the row itself, or else, if allowed,
    in other rows of the same salt.

    Args:
        n: how many tokens must be the same.
        shared_tokens: how many tokens of other rows to remember, the latest. 0, the default, means
            that each row learns from its own prompt and answer alone.

    Raises:
        TypeError, ValueError: a number is not an integer, `n` is less than 1, or `shared_tokens` is
            negative.

    Example:
        >>> speculative_batch_generate(model, NGramDraft(3), tokenizer, prompts)
    """

    def __init__(self, n: int = DEFAULT_NGRAM, *, shared_tokens: int = 0) -> None:
        self.n = whole_number("n", n, least=1)
        most = whole_number("shared_tokens", shared_tokens, least=0)
        self._shared = _SharedNGrams(most)

    def begin(self, salt: Hashable) -> NGramRow:
        """The state of a new row."""
        return NGramRow(self.n, salt, self._shared)

    def may_follow(self, state: NGramRow, tokens: list[int]) -> bool:
        """Whether the last n of these tokens occurred before."""
        return state.place_after(tokens) is not None

    def prepare(self, rows: list[DraftRow]) -> None:
        """Nothing is missing: a row learns its tokens when it is asked."""

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """For each row what followed its last n tokens before; none if they are new."""
        return [row.state.proposed(row) for row in rows]


class _Place(NamedTuple):
    """A position in a text, which may still grow."""

    tokens: list[int]
    start: int


class _SharedNGrams:
    """N-grams of all rows, by salt: the latest `most` of them. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._places: LRU[Hashable, _Place] = LRU(most)
        self._lock = Lock()

    def get(self, salt: Hashable, ngram: tuple[int, ...]) -> _Place | None:
        return self._places.get((salt, ngram))

    def put(self, salt: Hashable, starts: Mapping[tuple[int, ...], int], tokens: list[int]) -> None:
        """Remember where a text of this salt goes on after its n-grams."""
        if not self._places.most:
            return
        with self._lock:
            for ngram, start in starts.items():
                self._places[salt, ngram] = _Place(tokens, start)


class NGramRow:
    """The n-grams of one row, each with where the text last went on after it."""

    def __init__(self, n: int, salt: Hashable, shared: _SharedNGrams) -> None:
        self._n = n
        self._salt = salt
        self._shared = shared
        self._tokens: list[int] = []
        self._starts: dict[tuple[int, ...], int] = {}

    def place_after(self, tokens: list[int]) -> _Place | None:
        """Where the text went on after the same n tokens; None if they are new."""
        self._learn(tokens[len(self._tokens) :])
        last = tuple(self._tokens[-self._n :])
        start = self._starts.get(last)
        if start is None:
            return self._shared.get(self._salt, last)
        return _Place(self._tokens, start)

    def proposed(self, row: DraftRow) -> list[int]:
        """The tokens that followed the same n tokens; a text that ends before is taken to repeat
        what lies between the two places."""
        self._learn(row.tokens[len(self._tokens) :])
        if len(self._tokens) == len(row.tokens):
            self._learn([row.last])
        place = self.place_after(self._tokens)
        if place is None:
            return []
        text = place.tokens[place.start : place.start + row.most]
        return [text[at % len(text)] for at in range(row.most)]

    def _learn(self, tokens: list[int]) -> None:
        """Note the n-grams that these tokens follow."""
        first = max(len(self._tokens) - self._n, 0)
        self._tokens.extend(tokens)
        known = self._tokens[first:]
        ngrams = zip(*(known[at:] for at in range(self._n)), strict=False)
        # The last n-gram has no end here: nothing follows it yet.
        starts = dict(zip(ngrams, range(first + self._n, len(self._tokens)), strict=False))
        self._starts.update(starts)
        self._shared.put(self._salt, starts, self._tokens)
