"""Makes a batch of caches that mlx-lm cannot batch: it keeps one cache for each sequence, and the
model computes the sequences of a step one after the other (`model_call`).

So each gets what it would get alone, at the speed of one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from paged_kv.cache.row_numbers import integers
from paged_kv.integrations.states.counted_states import Held


class SeparateSequences(_BaseCache):
    """One layer's caches of several sequences.

    Args:
        caches: of mlx-lm, one for each sequence.
        model_versions: the versions of the model's weights at the sequences' starts, or None.

    Attributes:
        sequences: the caches.
        left: how many tokens of each sequence's coming steps are not padding; None without padding.
    """

    def __init__(self, caches: Sequence[Any], model_versions: Sequence[int | None]) -> None:
        self.sequences = list(caches)
        self.left: list[int] | None = None
        self._model_versions = list(model_versions)

    @property
    def held(self) -> list[Held]:
        """What it holds of each sequence."""
        pairs = zip(self.sequences, self._model_versions, strict=True)
        return [Held(cache.offset, version) for cache, version in pairs]

    @property
    def offset(self) -> int | mx.array:
        """The number of tokens; of several sequences, int32 [sequences]."""
        offsets = [cache.offset for cache in self.sequences]
        return offsets[0] if len(offsets) == 1 else mx.array(offsets)

    @property  # type: ignore[misc]  # mlx-lm's can be set, and nothing sets it
    def state(self) -> list[Any]:
        return [cache.state for cache in self.sequences]

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self.sequences)

    def empty(self) -> bool:
        return all(cache.empty() for cache in self.sequences)

    def size(self) -> int:
        return max(int(cache.offset) for cache in self.sequences)

    def set_version(self, model_version: int) -> None:
        """Note which version of the model continues all sequences."""
        self._model_versions = [model_version] * len(self.sequences)

    def widen(self, batch_size: int) -> None:
        """Let a new cache be that of a batch."""
        if self.empty() and len(self.sequences) == 1:
            self.sequences = [copy.deepcopy(self.sequences[0]) for _ in range(batch_size)]
            self._model_versions *= batch_size

    def advance(self, num_tokens: int) -> None:
        """Note a step that may have had padding."""
        if self.left is not None:
            self.left = [max(0, each - num_tokens) for each in self.left]

    def prepare(self, lengths: list[int] | None = None, **_: Any) -> None:
        self.left = lengths and list(lengths)

    def finalize(self) -> None:
        self.left = None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        kept = integers(batch_indices)
        self.sequences = [self.sequences[at] for at in kept]
        self._model_versions = [self._model_versions[at] for at in kept]

    def extend(self, other: SeparateSequences) -> None:
        self.sequences = [*self.sequences, *other.sequences]
        self._model_versions = [*self._model_versions, *other._model_versions]

    def extract(self, idx: int) -> SeparateSequences:
        one = copy.deepcopy(self.sequences[idx])
        return SeparateSequences([one], [self._model_versions[idx]])

    @classmethod
    def merge(cls, caches: list[SeparateSequences]) -> SeparateSequences:
        batch = cls([], [])
        for cache in caches:
            batch.extend(copy.deepcopy(cache))
        return batch


def step_of_separate(
    step: Callable[..., mx.array], tokens: mx.array, caches: list[SeparateSequences]
) -> mx.array:
    """See `one_by_one`."""
    batch_size, num_tokens = tokens.shape
    for cache in caches:
        cache.widen(batch_size)
    left = caches[0].left or [num_tokens] * batch_size
    rows = [[cache.sequences[at] for cache in caches] for at in range(batch_size)]
    logits = one_by_one(step, tokens, [min(each, num_tokens) for each in left], rows)
    for cache in caches:
        cache.advance(num_tokens)
    return logits


def one_by_one(
    step: Callable[..., mx.array], tokens: mx.array, counts: list[int], rows: list[list[Any]]
) -> mx.array:
    """The logits of a step, [sequences, tokens, vocabulary], computed by `step(tokens, cache=)` for
    each sequence.

    Args:
        step: the model's call.
        tokens: [sequences, tokens].
        counts: how many of a sequence's tokens are not padding. Padding is not computed; its logits
            are 0.
        rows: the prompt cache of each sequence.
    """
    num_tokens = tokens.shape[1]
    found = [
        step(tokens[at : at + 1, :count], cache=rows[at]) if count else None
        for at, count in enumerate(counts)
    ]
    vocabulary = next(each for each in found if each is not None)
    return mx.concatenate([_padded(each, num_tokens, vocabulary) for each in found])


def _padded(logits: mx.array | None, num_tokens: int, like: mx.array) -> mx.array:
    if logits is None:
        return mx.zeros((1, num_tokens, like.shape[2]), like.dtype)
    missing = num_tokens - logits.shape[1]
    return mx.pad(logits, [(0, 0), (0, missing), (0, 0)]) if missing else logits
