"""mlx-lm's BatchGenerator, with drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.generate import BatchGenerator

from paged_kv.checks import described, whole_number
from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from paged_kv.integrations.speculation.batch import RowOptions, SpeculationCounts, SpeculativeBatch
from paged_kv.integrations.speculation.draft_lengths import AdaptiveLengths, DraftLengths
from paged_kv.integrations.speculation.drafts import Draft
from paged_kv.integrations.speculation.rollback import require_rollback

DEFAULT_DRAFT_TOKENS = 4


class SpeculativeBatchGenerator(BatchGenerator):
    """mlx-lm's BatchGenerator, whose rows draft tokens. `insert`, `remove` and `next` are mlx-lm's;
    `next` may return several responses for a row, in order; each has the row's counts so far as
    `speculation`.

    Every response is what it would be without drafts: in float32 greedy tokens are the same,
    sampled tokens are samples of the model, log-probabilities are the model's.

    Args:
        model: a model of mlx-lm. Install a `PagedCacheFactory`, or insert caches from one.
        draft: proposes tokens, such as `NGramDraft()`.
        num_draft_tokens: the most tokens to draft for a row in a step.
        options_of: how a row drafts, by uid, if rows differ; then `num_draft_tokens` is not used.
        lengths: chooses how many of these a step drafts. None, the default, chooses by acceptance
            and measured times, and does not draft where that is slower; `FixedLengths()` always
            drafts as many as it may.
        options: BatchGenerator's.

    Raises:
        TypeError: `draft` proposes nothing, or BatchGenerator does not know an option.
        ValueError: `num_draft_tokens` is less than 1.
    """

    def __init__(
        self,
        model: Any,
        draft: Draft,
        *,
        num_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        options_of: Callable[[int], RowOptions] | None = None,
        lengths: DraftLengths | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)  # first: mlx-lm's __del__ needs it
        require_draft(draft)
        every = RowOptions(whole_number("num_draft_tokens", num_draft_tokens, least=1))
        self._batch = SpeculativeBatch(
            model,
            self.sampler,
            draft,
            options_of or (lambda _: every),
            lengths or AdaptiveLengths(),
        )
        GeneratorParts(self).generating = self._batch

    def insert_segments(self, *arguments: Any, **named: Any) -> list[int]:
        """BatchGenerator's method of this name.

        Raises:
            ValueError: as BatchGenerator; or a cache cannot be rolled back. Nothing is inserted.
        """
        uids: list[int] = super().insert_segments(*arguments, **named)
        inserted = [each for each in GeneratorParts(self).waiting if each[0] in uids]
        try:
            for _, _, _, prompt_cache, *_ in inserted:
                require_rollback(prompt_cache)
        except ValueError:
            self.remove(uids)  # type: ignore[no-untyped-call]  # mlx-lm's
            raise
        return uids

    def next_generated(self) -> list[SpeculativeBatch.Response]:
        """The next tokens of each row; empty when all rows have ended."""
        responses: list[SpeculativeBatch.Response] = super().next_generated()  # type: ignore[no-untyped-call]  # mlx-lm's
        return responses

    @property
    def counts(self) -> SpeculationCounts:
        """Counts of all rows since the beginning."""
        return self._batch.counts


def require_draft(draft: object) -> None:
    """Raises TypeError unless the value is a draft."""
    if isinstance(draft, type) or not all(
        callable(getattr(draft, name, None))
        for name in ("begin", "may_follow", "prepare", "propose")
    ):
        raise TypeError(
            "draft must be a draft, such as NGramDraft() or ModelDraft(model, factory), got "
            f"{described(draft)}"
        )
