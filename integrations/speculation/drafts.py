"""Drafts: they propose the tokens that a model may say next, for all rows of a batch at once.

`NGramDraft` is prompt look-up: what followed the same n tokens earlier. It needs no second model,
and answers that repeat their prompt, such as an edited file, or themselves, are drafted from there.
`ModelDraft` asks a smaller model, and `HeadDraft` a model's own prediction head.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.checks import whole_number
from paged_kv.integrations.batching.short_memory import Shortage, attempted
from paged_kv.integrations.heads.model_head import heads
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.speculation.rollback import ragged_step
from paged_kv.lru import LRU
from paged_kv.steps.sequence import Sequence

logger = logging.getLogger("paged_kv")

DEFAULT_NGRAM = 3

# A row that is further behind computes its tokens alone, without padding the other rows.
_FEW_TOKENS = 32
_PREFILL_STEP = 2048

T = TypeVar("T")


class DraftRow(NamedTuple):
    """A row of a batch that asks for tokens."""

    state: Any  # what the draft keeps of this row, from `Draft.begin`
    # The prompt, and the tokens emitted after it. The row's own list: not to be changed.
    tokens: list[int]
    last: int  # the token after these
    most: int  # the most tokens to propose, at least 1
    # The row's sequence of pages, which holds `tokens`; None if the model has no pages
    sequence: Sequence | None = None


class Draft(Protocol):
    """Proposes tokens for the rows of a batch. Several generators may share a draft. One that
    derives from this needs only `propose`: then rows have no state, and nothing is missing."""

    def begin(self, salt: Hashable) -> Any:
        """The state of a new row. Rows with different salts must not learn from each other."""
        return None

    def may_follow(self, state: Any, tokens: list[int]) -> bool:
        """Whether the draft may have tokens to propose once the token after `tokens` is known.

        It is asked while the model still computes that token, so it must be cheap: a row for which
        nothing can be proposed does not wait for it.
        """
        return True

    def prepare(self, rows: list[DraftRow]) -> None:
        """Compute what is missing before these rows can draft, such as a prompt that the draft has
        not read."""
        return None

    @abstractmethod
    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """For each row, which was prepared, the tokens that may come after `last`: at most `most`,
        or none."""
        ...


class _Place(NamedTuple):
    """A position in a text, which may still grow."""

    tokens: list[int]
    start: int


@dataclass(eq=False)
class NGramRow:
    """A row's tokens, and where they last went on after each n-gram."""

    salt: Hashable
    tokens: list[int] = field(default_factory=list)
    starts: dict[tuple[int, ...], int] = field(default_factory=dict)


class NGramDraft(Draft):
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
        # By salt and n-gram; threads may share it.
        self._shared: LRU[Hashable, _Place] = LRU(
            whole_number("shared_tokens", shared_tokens, least=0)
        )
        self._lock = Lock()

    def begin(self, salt: Hashable) -> NGramRow:
        return NGramRow(salt)

    def may_follow(self, state: NGramRow, tokens: list[int]) -> bool:
        self._learn(state, tokens[len(state.tokens) :])
        return self._place_after(state) is not None

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """For each row what followed its last n tokens before; none if they are new. A text that
        ends before is taken to repeat what lies between the two places."""
        return [self._proposed(row.state, row) for row in rows]

    def _proposed(self, state: NGramRow, row: DraftRow) -> list[int]:
        new = row.tokens[len(state.tokens) :]
        if len(state.tokens) <= len(row.tokens):
            new.append(row.last)
        self._learn(state, new)
        place = self._place_after(state)
        if place is None:
            return []
        text = place.tokens[place.start : place.start + row.most]
        return [text[at % len(text)] for at in range(row.most)]

    def _place_after(self, state: NGramRow) -> _Place | None:
        """Where the text went on after the same n tokens; None if they are new."""
        last = tuple(state.tokens[-self.n :])
        if (start := state.starts.get(last)) is not None:
            return _Place(state.tokens, start)
        return self._shared.get((state.salt, last))

    def _learn(self, state: NGramRow, tokens: list[int]) -> None:
        """Note the n-grams that these tokens follow."""
        first = max(len(state.tokens) - self.n, 0)
        state.tokens.extend(tokens)
        known = state.tokens[first:]
        ngrams = zip(*(known[at:] for at in range(self.n)), strict=False)
        # The last n-gram has no end here: nothing follows it yet.
        starts = dict(zip(ngrams, range(first + self.n, len(state.tokens)), strict=False))
        state.starts.update(starts)
        if self._shared.most:
            with self._lock:
                for ngram, start in starts.items():
                    self._shared[state.salt, ngram] = _Place(state.tokens, start)


def _within_memory(work: Callable[[], T]) -> T | None:
    """The result of what a draft computes, or None if there is no memory for it."""
    try:
        result = attempted(work)
    except PoolExhausted as error:
        result = Shortage(str(error))
    if isinstance(result, Shortage):
        logger.info("nothing is drafted: %s", result.why)
        return None
    return result


class HeadDraft(Draft):
    """Proposes the tokens that a model's head expects. The head reads each step of its model, and
    its pages are the sequence's: a row has no state, and nothing is missing.

    When there is no memory for drafted tokens, nothing is drafted.

    Args:
        factory: a factory of the model, with a `head`.

    Raises:
        ValueError: it has no head.
    """

    def __init__(self, factory: PagedCacheFactory) -> None:
        head = heads.get(factory.pool)
        if head is None:
            raise ValueError(
                "the factory has no prediction head: make it with one, as "
                "PagedCacheFactory(model, head=load_head(folder))"
            )
        self._head = head

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        sequences = [row.sequence for row in rows if row.sequence is not None]
        last, count = [row.last for row in rows], max(row.most for row in rows)
        drafted = _within_memory(partial(self._head.draft, sequences, last, count))
        tokens: Any = [[]] * len(rows) if drafted is None else drafted.tolist()
        return [each[: row.most] for row, each in zip(rows, tokens, strict=True)]


@dataclass(eq=False)
class ModelDraftRow:
    """The draft model's cache of one row."""

    salt: Hashable  # of the row
    # One sequence; None before the first draft, and after a full pool
    cache: list[Any] | None = None
    known: int = 0  # how many tokens of the row the cache holds
    # The drafted tokens that the cache holds after these
    drafted: list[int] = field(default_factory=list)


class ModelDraft(Draft):
    """Proposes the greedy tokens of a smaller model with the same vocabulary.

    Each row has pages of the draft model too. A prompt that the factory has cached is not computed
    again. When there is no memory for a row's tokens, nothing is drafted.

    Args:
        model: a model of mlx-lm, without recurrent layers.
        factory: a `PagedCacheFactory` of that model.

    Raises:
        ValueError: the model has caches that are not pages, so its drafts cannot be removed.
    """

    def __init__(self, model: Any, factory: PagedCacheFactory) -> None:
        caches = factory.make_cache()
        if unpaged := {
            type(each).__name__ for each in caches if not isinstance(each, PagedKVCache)
        }:
            raise ValueError(
                "a draft model must keep pages in every layer, as rejected drafts are removed from "
                f"them; this one has {', '.join(sorted(unpaged))}: choose another, or NGramDraft()"
            )
        self._model = model
        self._factory = factory

    def begin(self, salt: Hashable) -> ModelDraftRow:
        return ModelDraftRow(salt)

    def prepare(self, rows: list[DraftRow]) -> None:
        """Compute what the draft model has not read yet; nothing is drafted without memory."""

        def catch_up() -> bool:
            for row in rows:
                self._read(row.state, row.tokens)
            return True

        self._attempted(rows, catch_up)

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        drafts = None
        if all(row.state.cache is not None for row in rows):
            most = max(row.most for row in rows)
            drafts = self._attempted(rows, lambda: self._continue(rows, most))
        drafts = drafts or [[] for _ in rows]
        return [draft[: row.most] for row, draft in zip(rows, drafts, strict=True)]

    def _attempted(self, rows: list[DraftRow], work: Callable[[], T]) -> T | None:
        """The result of some work; None if there is no memory for it. Then the draft model's pages
        of these rows are given back."""
        result = _within_memory(work)
        if result is None:
            for row in rows:
                row.state.cache, row.state.known, row.state.drafted = None, 0, []
        return result

    def _read(self, state: ModelDraftRow, tokens: list[int]) -> None:
        """Remove rejected tokens, and compute all but the last few that are missing."""
        if state.cache is None:
            state.cache, state.known = self._factory.fetch_cache(tokens, salt=state.salt)
        accepted = common_prefix(state.drafted, tokens[state.known :])
        if rejected := len(state.drafted) - accepted:
            for layer in state.cache:
                layer.trim(rejected)
        state.known, state.drafted = state.known + accepted, []
        is_prompt = len(tokens) - state.known > _FEW_TOKENS
        while (missing := len(tokens) - state.known) >= _FEW_TOKENS:
            step = tokens[state.known : state.known + min(missing, _PREFILL_STEP)]
            self._model(mx.array([step]), cache=state.cache)
            mx.eval([layer.state for layer in state.cache])
            state.known += len(step)
        if is_prompt:
            self._factory.insert_cache(tokens[: state.known], state.cache, salt=state.salt)

    def _continue(self, rows: list[DraftRow], count: int) -> list[list[int]]:
        """The next `count` tokens of each row, one step for each token."""
        caches = [
            PagedKVCache(layers[0].pool, layers[0].layer, [each.sequences[0] for each in layers])
            for layers in zip(*(row.state.cache for row in rows), strict=True)
        ]
        inputs = [[*row.tokens[row.state.known :], row.last] for row in rows]
        logits = ragged_step(self._model, caches, inputs)
        last = mx.array([len(each) - 1 for each in inputs])
        token = mx.argmax(logits[mx.arange(len(rows)), last], axis=-1)
        drafted = [token]
        for _ in range(count - 1):
            token = mx.argmax(self._model(token[:, None], cache=caches)[:, -1], axis=-1)
            drafted.append(token)
        drafts: Any = mx.stack(drafted, axis=1).tolist()
        for row, draft in zip(rows, drafts, strict=True):
            # The last drafted token is not computed.
            row.state.known, row.state.drafted = len(row.tokens) + 1, draft[:-1]
        return list(drafts)
