"""Runs jobs on one loaded model: in a batch, or one job alone."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from paged_kv.integrations.grammar.constraints import CallConstraint, Constraint
from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.server.engine.batched_rows import BatchedRows, Happened
from paged_kv.server.engine.jobs import Begun, Empty, Failed, Job, Prompt
from paged_kv.server.engine.paged_model_provider import (
    LoadedModel,
    PagedModelProvider,
)
from paged_kv.server.engine.sampling import Samplers
from paged_kv.server.engine.single_row import SingleRow
from paged_kv.server.http.api_errors import APIError, wrong_value


class Rows:
    """The running jobs of a model. All of this runs on the generation thread.

    Args:
        provider: has loaded `loaded`.
        loaded: the model.
        stream: of MLX.
    """

    def __init__(
        self, provider: PagedModelProvider, loaded: LoadedModel, stream: mx.Stream
    ) -> None:
        self.loaded = loaded
        self._batch = BatchedRows(provider, loaded, stream)
        self._single = SingleRow(provider, loaded, stream)
        self._samplers = Samplers(loaded)
        self._grammars: dict[Job, list[FollowedGrammar]] = {}
        self._empty: list[Job] = []  # that are to generate nothing

    def __len__(self) -> int:
        return len(self._batch) + len(self._single) + len(self._empty)

    def can_join(self, prompt: Prompt) -> bool:
        """Whether a job may begin or wait beside those that are there: not if it or one of them
        runs alone."""
        return not len(self) or not (len(self._single) or self._is_alone(prompt))

    def begin(self, job: Job, prompt: Prompt) -> None:
        """Add a job; it begins in the next step that has room for it.

        Raises:
            APIError: 400, its sampling options or its grammar do not work.
        """
        samplings = self._samplers.of(job.arguments, job.choices)
        if job.computes_nothing:
            self._empty.append(job)
            return
        if later := job.ending.processors(self.loaded.tokenizer, len(prompt.tokens)):
            samplings = [replace(each, processors=[*each.processors, *later]) for each in samplings]
        if grammars := _begun_grammars(self.loaded, job, prompt):
            samplings = [
                each.within(grammar) for each, grammar in zip(samplings, grammars, strict=True)
            ]
            self._grammars[job] = grammars
        rows = self._single if self._is_alone(prompt) else self._batch
        rows.begin(job, prompt, samplings)

    def step(self) -> Happened:
        """Compute a token of every choice, and a part of the unfinished prompts."""
        while self._empty:
            job = self._empty.pop()
            yield job, Begun(job, self.loaded)
            yield from ((job, Empty(number)) for number in job.numbers)
        for rows in (self._batch, self._single):
            if len(rows):
                yield from rows.step()
        for job, grammars in list(self._grammars.items()):
            if error := next((each.error for each in grammars if each.error is not None), None):
                self.drop(job)
                field = None if job.constraint is None else job.constraint.field
                stopped = f"{field} is too large or too slow to follow: {error}"
                yield job, Failed(wrong_value(stopped, field))

    def drop(self, job: Job, number: int | None = None) -> None:
        """Stop a job, or one of its choices."""
        self._batch.drop(job, number)
        self._single.drop(job, number)
        if number is None:
            self._grammars.pop(job, None)
            self._empty = [each for each in self._empty if each is not job]

    def holds(self, job: Job) -> bool:
        """Whether the job has an unfinished choice."""
        return self._batch.holds(job) or self._single.holds(job) or job in self._empty

    def close(self) -> None:
        """Drop all jobs."""
        self._batch.close()
        self._single.close()

    def _is_alone(self, prompt: Prompt) -> bool:
        return not self.loaded.is_batchable or prompt.media is not None


def model_constraint(
    requested: Constraint | CallConstraint | None, loaded: LoadedModel | None
) -> Constraint | None:
    """What a request's constraint means for its model. What depends on the model is None while
    that is not loaded.

    Raises:
        APIError: 400, the model does not call tools as is asked.
    """
    if requested is None or isinstance(requested, Constraint):
        return requested
    try:
        return None if loaded is None else requested.for_model(loaded.tokenizer)
    except ValueError as error:
        raise wrong_value(f"{requested.field}: {error}", requested.field) from None


def _begun_grammars(loaded: LoadedModel, job: Job, prompt: Prompt) -> list[FollowedGrammar]:
    """The grammar of each choice, at its beginning; none if any text will do. It is compiled here
    if it was not before, as for a model that was loaded for this job.

    Raises:
        APIError: 400, it does not compile, or the model's answers have a form of their own.
    """
    constraint = model_constraint(job.constraint, loaded)
    if constraint is None:
        return []
    compiled = job.compiled
    try:
        if compiled is None or not loaded.grammars.made(compiled):
            compiled = loaded.grammars.compiled(constraint)
    except APIError:
        if constraint.is_optional:
            return []
        raise
    try:
        place = constraint.place(loaded.tokenizer, prompt.initial_state)
    except ValueError as error:
        raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
    return [compiled.begin(**place) for _ in range(job.choices)]
