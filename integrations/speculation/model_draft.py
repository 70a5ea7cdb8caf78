"""Drafts with a smaller model, for all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.prompt_segments import Reuses
from paged_kv.integrations.batching.short_memory import Shortage
from paged_kv.integrations.speculation.drafts import DraftRow, within_memory
from paged_kv.integrations.speculation.rollback import ragged_step

# A row that is further behind computes its tokens alone, without padding the other rows.
_FEW_TOKENS = 32
_PREFILL_STEP = 2048

T = TypeVar("T")


class DraftFactory(Reuses, Protocol):
    """Makes, finds and keeps the prompt caches of the draft model."""

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]: ...


class ModelDraft:
    """Proposes the greedy tokens of a smaller model with the same vocabulary.

    Each row has pages of the draft model too. A prompt that the factory has cached is not computed
    again. When there is no memory for a row's tokens, nothing is drafted.

    Args:
        model: a model of mlx-lm, without recurrent layers.
        factory: a `PagedCacheFactory` of that model.

    Raises:
        ValueError: the model has caches that are not pages, so its drafts cannot be removed.
    """

    def __init__(self, model: Any, factory: DraftFactory) -> None:
        unpaged = {
            type(cache).__name__
            for cache in factory.make_cache()
            if not isinstance(cache, PagedKVCache)
        }
        if unpaged:
            raise ValueError(
                "a draft model must keep pages in every layer, as rejected drafts are removed from "
                f"them; this one has {', '.join(sorted(unpaged))}: choose another, or NGramDraft()"
            )
        self._model = model
        self._factory = factory

    def begin(self, salt: Hashable) -> ModelDraftRow:
        """The state of a new row."""
        return ModelDraftRow(salt)

    def may_follow(self, state: ModelDraftRow, tokens: list[int]) -> bool:
        """A model always has something to propose."""
        return True

    def prepare(self, rows: list[DraftRow]) -> None:
        """Compute what the draft model has not read yet; nothing is drafted without memory."""
        _within_memory(lambda: self._catch_up(rows), rows)

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """For each row the next tokens of the draft model; none if there is no memory."""
        if any(row.state.cache is None for row in rows):
            return [[] for _ in rows]
        most = max(row.most for row in rows)
        drafts = _within_memory(lambda: self._continue(rows, most), rows)
        if drafts is None:
            return [[] for _ in rows]
        return [draft[: row.most] for row, draft in zip(rows, drafts, strict=True)]

    def _catch_up(self, rows: list[DraftRow]) -> None:
        for row in rows:
            self._read(row.state, row.tokens)

    def _read(self, state: ModelDraftRow, tokens: list[int]) -> None:
        """Remove rejected tokens, and compute all but the last few that are missing."""
        if state.cache is None:
            state.cache, state.known = self._factory.fetch_cache(tokens, salt=state.salt)
        state.remove_rejected(tokens)
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
        caches = _batch_of([row.state.cache for row in rows])
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


@dataclass(eq=False)
class ModelDraftRow:
    """The draft model's cache of one row.

    Attributes:
        salt: of the row.
        cache: one sequence; None before the first draft, and after a full pool.
        known: how many tokens of the row the cache holds.
        drafted: the drafted tokens that the cache holds after these.
    """

    salt: Hashable
    cache: list[PagedKVCache] | None = None
    known: int = 0
    drafted: list[int] = field(default_factory=list)

    def remove_rejected(self, tokens: list[int]) -> None:
        """Keep the drafted tokens that are now among the row's tokens."""
        assert self.cache is not None
        accepted = common_prefix(self.drafted, tokens[self.known :])
        if rejected := len(self.drafted) - accepted:
            for layer in self.cache:
                layer.trim(rejected)
        self.known, self.drafted = self.known + accepted, []

    def forget(self) -> None:
        """Give all pages back."""
        self.cache, self.known, self.drafted = None, 0, []


def _within_memory(work: Callable[[], T], rows: list[DraftRow]) -> T | None:
    """The result of some work; None if there is no memory for it. Then the draft model's pages of
    these rows are given back."""
    result = within_memory(work)
    if not isinstance(result, Shortage):
        return result
    for row in rows:
        row.state.forget()
    return None


def _batch_of(caches: list[list[PagedKVCache]]) -> list[PagedKVCache]:
    """The caches as one batch of the same sequences."""
    return [
        PagedKVCache(layers[0].pool, layers[0].layer, [cache.sequences[0] for cache in layers])
        for layers in zip(*caches, strict=True)
    ]
