"""Computes the sequences of a step one after the other, for models that take no ragged batch.

So each gets what it would get alone, at the speed of one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.prompt_caches import frozen, leaves, paged_caches, replaced
from paged_kv.integrations.mlx_lm_internals import let_load
from paged_kv.steps.batch import integers
from paged_kv.steps.blocks import reserve

# These files of mlx-lm make positions or a mask for one sequence and use them for all:
# gpt_bigcode.py, line 150, and llama4.py, line 232, of the first cache's offset as a number;
# phi3small.py, line 134, of a batch's mask, which has an axis less than the scores.
_ONE_AT_A_TIME = frozenset(
    f"mlx_lm.models.{name}" for name in ("gpt_bigcode", "llama4", "phi3small")
)


def takes_one_at_a_time(kind: type[Module]) -> bool:
    """Whether models of a class take one sequence at a time; so do all whose caches append rows."""
    return kind.__module__ in _ONE_AT_A_TIME


class SeparateCaches:
    """The caches without pages of one layer, one for each sequence and of the library's class, of a
    model that takes one sequence at a time. It changes copies of them, which take their places when
    its step is done.
    """

    def __init__(self, *rows: Any) -> None:
        self.rows = list(rows)
        _kinds.update({type(each).__name__: type(each) for each in rows})

    @property
    def state(self) -> list[Any]:
        """For each sequence the class of its cache, by name, the cache's state and the rest."""
        return [[type(each).__name__, each.state, each.meta_state] for each in self.rows]

    @classmethod
    def from_state(cls, state: list[Any]) -> SeparateCaches:
        """The caches of a `state`, possibly of another process.

        Raises:
            ValueError: no factory of the model is open, which knows the classes.
        """
        return cls(*[_loaded(*each) for each in state])

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.rows)

    def size(self) -> int:
        return 0  # as for the library's caches of states: pages know the length

    def empty(self) -> bool:
        return all(each.empty() for each in self.rows)

    def is_trimmable(self) -> bool:
        return False  # states hold what tokens came to

    def prepare(self, **padding: Any) -> None:
        """Nothing: padding is not computed."""

    def finalize(self) -> None:
        pass

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        self.rows = [self.rows[at] for at in integers(batch_indices)]

    def extend(self, other: SeparateCaches) -> None:
        self.rows = [*self.rows, *other.rows]

    def extract(self, idx: int) -> SeparateCaches:
        return SeparateCaches(self.rows[idx])

    @classmethod
    def merge(cls, caches: list[SeparateCaches]) -> SeparateCaches:
        return cls(*[row for each in caches for row in each.rows])


_kinds: dict[str, Any] = {}
"""The classes of rows, by name."""


def _loaded(name: str, state: Any, rest: Any) -> Any:
    if name not in _kinds:
        raise ValueError(
            f"the saved cache has a {name}: make a PagedCacheFactory of its model before you load "
            "it"
        )
    kind = _kinds[name]
    if hasattr(kind, "from_state"):
        return kind.from_state(state, rest)
    cache = kind()
    cache.state, cache.meta_state = state, rest
    return cache


def is_separate(model: Module, prompt_cache: list[Any]) -> bool:
    """Whether a batch of such prompt caches is computed one sequence after the other."""
    paged = paged_caches(prompt_cache)
    if not paged:
        return False
    if paged[0].pool.rows or takes_one_at_a_time(type(model)):
        return True
    return any(isinstance(each, SeparateCaches) for each in leaves(prompt_cache))


def widen(caches: list[Any], batch_size: int) -> None:
    """Let a new prompt cache be that of a batch."""
    first = paged_caches(caches)[0]
    if not batch_size > 1 == len(first.sequences) or not first.empty():
        return
    for cache in leaves(caches):
        if isinstance(cache, SeparateCaches):
            cache.rows *= batch_size
        else:
            cache.batch = cache.batch.widened(batch_size)


@contextmanager
def rows_of(caches: list[Any]) -> Iterator[list[list[Any]]]:
    """The prompt cache of each sequence of a batch: views of the same pages, and copies of caches
    without pages, which are kept if nothing fails."""
    count = len(paged_caches(caches)[0].sequences)
    rows = [row_of(caches, at) for at in range(count)]
    yield rows
    for cache, *ofs in zip(leaves(caches), *map(leaves, rows), strict=True):
        if isinstance(cache, SeparateCaches):
            cache.rows = ofs
        else:
            cache.depend_on(ofs)


@contextmanager
def alone(caches: list[Any]) -> Iterator[list[Any]]:
    """The prompt cache of one sequence as its model takes it; see `rows_of`."""
    if not any(isinstance(each, SeparateCaches) for each in leaves(caches)):
        yield caches
        return
    with rows_of(caches) as (row,):
        yield row


def one_by_one(
    step: Callable[..., mx.array], tokens: mx.array, caches: list[Any], rows: list[list[Any]]
) -> mx.array:
    """The logits of a step, [sequences, tokens, vocabulary], computed by `step(tokens, cache=)` for
    each sequence.

    Args:
        step: the model's call.
        tokens: [sequences, tokens]. Padding is not computed; its logits are 0.
        caches: the prompt cache of all sequences.
        rows: the one of each, see `rows_of`.

    Raises:
        PoolExhausted: the budget does not hold the step's blocks; nothing was changed.
    """
    first, num_tokens = paged_caches(caches)[0], tokens.shape[1]
    progress = [each.progress(first.layer) for each in first.sequences]
    counts = [each.padding.own(num_tokens) for each in progress]
    steps = zip(first.sequences, counts, strict=True)
    # Now, for all of them: what the budget does not hold is known before the first is computed.
    reserve(first.pool, [each.next_step(first.layer, count) for each, count in steps])
    found: list[mx.array | None] = []
    for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
        found.append(step(tokens[at : at + 1, :count], cache=row) if count else None)
        if count and first.pool.ranks.size > 1:
            # Ranks exchange what belongs to one sequence before they begin with the next one, so
            # that all do so in the same order.
            mx.eval([each.state for each in row])
    vocabulary = next(each for each in found if each is not None)
    return mx.concatenate([padded(each, num_tokens, vocabulary) for each in found])


def row_of(caches: list[Any], row: int) -> list[Any]:
    """The prompt cache of one sequence, as its model takes it."""

    def of_row(cache: Any) -> Any:
        if isinstance(cache, SeparateCaches):
            return frozen(cache.rows[row])
        if isinstance(cache, PagedKVCache):
            return type(cache)(cache.pool, cache.layer, [cache.sequences[row]])
        return cache

    return [replaced(cache, of_row) for cache in caches]


def padded(logits: mx.array | None, num_tokens: int, like: mx.array) -> mx.array:
    """The logits of a sequence, [1, tokens, vocabulary], with zeros for padding; None if all of it
    is. `like` are those of another one."""
    if logits is None:
        return mx.zeros((1, num_tokens, like.shape[2]), like.dtype)
    missing = num_tokens - logits.shape[1]
    return mx.pad(logits, [(0, 0), (0, missing), (0, 0)]) if missing else logits


let_load(SeparateCaches)
