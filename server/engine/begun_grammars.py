"""Begins the grammars of a job's choices."""

from __future__ import annotations

from paged_kv.integrations.grammar.constraints import CallConstraint, Constraint
from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.server.engine.jobs import Job, Prompt
from paged_kv.server.engine.paged_model_provider import (
    LoadedModel,
    PagedModelProvider,
)
from paged_kv.server.http.api_errors import APIError, wrong_value


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


def begun_grammars(loaded: LoadedModel, job: Job, prompt: Prompt) -> list[FollowedGrammar]:
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


def compile_on_other_ranks(provider: PagedModelProvider, constraint: Constraint) -> None:
    """Compile a grammar on a thread, unless this is the first rank, which compiles it by itself.
    So no step waits for it when its request begins, as long as ranks are about as quick."""
    if provider.ranks.rank > 0 and provider.loaded is not None:
        provider.loaded.grammars.begin_compiling(constraint)


def stopped_grammar(job: Job, error: str) -> APIError:
    """The answer to a job whose grammar became too large or too slow while it was followed."""
    field = None if job.constraint is None else job.constraint.field
    return wrong_value(f"{field} is too large or too slow to follow: {error}", field)
