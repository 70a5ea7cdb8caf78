"""Runs jobs on one loaded model: in a batch, or one job alone."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.server.engine.batched_rows import BatchedRows, Happened
from paged_kv.server.engine.begun_grammars import begun_grammars, stopped_grammar
from paged_kv.server.engine.jobs import Begun, Empty, Failed, Job, Prompt
from paged_kv.server.engine.paged_model_provider import (
    LoadedModel,
    PagedModelProvider,
)
from paged_kv.server.engine.sampling import Samplers
from paged_kv.server.engine.single_row import SingleRow


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

    def forget(self, job: Job) -> None:
        """Note that a job has ended."""
        self._grammars.pop(job, None)

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
        if grammars := begun_grammars(self.loaded, job, prompt):
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
                yield job, Failed(stopped_grammar(job, error))

    def drop(self, job: Job, number: int | None = None) -> None:
        """Stop a job, or one of its choices."""
        self._batch.drop(job, number)
        self._single.drop(job, number)
        if number is None and job in self._empty:
            self._empty.remove(job)

    def holds(self, job: Job) -> bool:
        """Whether the job has an unfinished choice."""
        return self._batch.holds(job) or self._single.holds(job) or job in self._empty

    def close(self) -> None:
        """Drop all jobs."""
        self._batch.close()
        self._single.close()

    def _is_alone(self, prompt: Prompt) -> bool:
        return not self.loaded.is_batchable or prompt.media is not None
