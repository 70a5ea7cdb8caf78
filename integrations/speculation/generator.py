"""mlx-lm's BatchGenerator, with drafts; and answers to several prompts at once by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator, BatchResponse

from paged_kv.checks import TokenIds, described, token_ids, whole_number
from paged_kv.integrations.cache_library import require_model
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from paged_kv.integrations.prompt_cache_hook import installed_factory
from paged_kv.integrations.samples import require_tokenizer
from paged_kv.integrations.speculation.batch import RowOptions, SpeculationCounts, SpeculativeBatch
from paged_kv.integrations.speculation.draft_lengths import DraftLengths
from paged_kv.integrations.speculation.draft_models import divided_factories
from paged_kv.integrations.speculation.drafts import Draft, ModelDraft
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
            lengths or DraftLengths(),
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


@dataclass
class SpeculativeBatchResponse(BatchResponse):
    """mlx-lm's BatchResponse, with counts of drafted and accepted tokens."""

    counts: SpeculationCounts = field(default_factory=SpeculationCounts)  # of all rows together
    row_counts: list[SpeculationCounts] = field(default_factory=list)  # of each row


def speculative_batch_generate(
    model: Module,
    draft: Module | Draft,
    tokenizer: Any,
    prompts: Sequence[str | TokenIds],
    *,
    num_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
    lengths: DraftLengths | None = None,
    max_tokens: int | Sequence[int] = 128,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    max_bytes: float | str | None = None,
) -> SpeculativeBatchResponse:
    """Continue several prompts as one batch, in fewer steps than mlx-lm's `batch_generate`.

    What it returns is what it would be without drafts: in float32 greedy tokens are the same, and
    sampled tokens are samples of the model.

    Args:
        model: a model of mlx-lm.
        draft: a smaller model with the same vocabulary, or a draft such as `NGramDraft()`.
        tokenizer: the model's tokenizer.
        prompts: texts or token ids.
        num_draft_tokens: the most tokens to draft for a row in a step.
        lengths: chooses how many of these a step drafts, as in `SpeculativeBatchGenerator`.
        max_tokens: the most tokens to generate; or one number per prompt.
        sampler: chooses tokens [N] from log-probabilities [N, vocabulary]; None means greedy.
        logits_processors: mlx-lm's; they see emitted tokens only.
        max_bytes: the most that pages of both models may take, such as "4GB"; each gets its share,
            in proportion to the bytes of a token. Models with an installed factory use that one.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        PoolExhausted: the budget does not hold one prompt and its answer.

    Example:
        >>> speculative_batch_generate(model, NGramDraft(), tokenizer, prompts).texts
    """
    require_model(model)
    require_tokenizer(tokenizer)
    encoded = [_encoded(tokenizer, prompt, at) for at, prompt in enumerate(prompts)]
    most = _one_each(max_tokens, len(encoded))
    models = [model, draft] if isinstance(draft, Module) else [model]
    with _factories_of(models, max_bytes) as factories:
        if isinstance(draft, Module):
            draft = ModelDraft(draft, factories[1])
        generator = SpeculativeBatchGenerator(
            model,
            draft,
            num_draft_tokens=num_draft_tokens,
            lengths=lengths,
            sampler=sampler,
            logits_processors=list(logits_processors or []),
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        )
        with closing(generator), generator.stats() as stats:
            uids = generator.insert(encoded, most)
            tokens: dict[int, list[int]] = {uid: [] for uid in uids}
            counts = {uid: SpeculationCounts() for uid in uids}
            while responses := generator.next_generated():
                for response in responses:
                    counts[response.uid] = response.speculation
                    if response.finish_reason != "stop":
                        tokens[response.uid].append(response.token)
        return SpeculativeBatchResponse(
            texts=[tokenizer.decode(tokens[uid]) for uid in uids],
            stats=stats,
            caches=None,
            token_ids=[tokens[uid] for uid in uids],
            counts=generator.counts,
            row_counts=[counts[uid] for uid in uids],
        )


@contextmanager
def _factories_of(models: list[Module], max_bytes: float | str | None) -> Iterator[list[Any]]:
    """A factory for each model, installed: those that are installed already, and new ones, which
    are closed afterwards."""
    options = CacheOptions(max_bytes=max_bytes)
    found = [installed_factory(model) for model in models]
    missing = [model for model, factory in zip(models, found, strict=True) if factory is None]
    made = divided_factories(missing, options) if missing else []
    new = dict(zip(map(id, missing), made, strict=True))
    try:
        for factory in new.values():
            factory.install()
        yield [factory or new[id(model)] for model, factory in zip(models, found, strict=True)]
    finally:
        for factory in new.values():
            factory.close()


def _encoded(tokenizer: Any, prompt: str | TokenIds, at: int) -> list[int]:
    tokens = token_ids(
        tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, f"prompts[{at}]"
    )
    if not tokens:
        raise ValueError(f"prompts[{at}] is empty: give at least one token")
    return tokens


def _one_each(max_tokens: int | Sequence[int], count: int) -> list[int]:
    if not isinstance(max_tokens, Sequence):
        return [whole_number("max_tokens", max_tokens, least=1)] * count
    if len(max_tokens) != count:
        raise ValueError(
            f"max_tokens must be one number, or one for each prompt ({count}), got "
            f"{len(max_tokens)}"
        )
    return [whole_number("max_tokens", each, least=1) for each in max_tokens]
