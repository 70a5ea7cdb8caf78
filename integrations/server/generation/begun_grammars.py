"""Begins the grammars of a job's choices."""

from __future__ import annotations

from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.server.generation.jobs import Job, Prompt
from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel
from paged_kv.integrations.server.http.api_errors import APIError, wrong_value


def begun_grammars(
    loaded: LoadedModel, job: Job, constraint: Constraint, prompt: Prompt
) -> list[FollowedGrammar]:
    """The grammar of each choice, at its beginning. It is compiled here if it was not before, as on
    other ranks, or for a model that was loaded for this job.

    Raises:
        APIError: 400, it does not compile, or the model's answers have a form of their own.
    """
    compiled = job.compiled
    if compiled is None or not loaded.grammars.made(compiled):
        compiled = loaded.grammars.compiled(constraint)
    try:
        place = constraint.place(loaded.tokenizer, prompt.initial_state)
    except ValueError as error:
        raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
    return [compiled.begin(**place) for _ in range(job.choices)]


def stopped_grammar(job: Job, error: str) -> APIError:
    """The answer to a job whose grammar became too large or too slow while it was followed."""
    field = None if job.constraint is None else job.constraint.field
    return wrong_value(f"{field} is too large or too slow to follow: {error}", field)
