"""Jobs for the generation thread, and the events that it sends back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, Literal

from mlx_lm.server import GenerationArguments

from paged_kv.integrations.grammar.constraints import CallConstraint, Constraint
from paged_kv.integrations.grammar.vocabulary import CompiledGrammar
from paged_kv.integrations.media_keys import PromptMedia
from paged_kv.integrations.speculation.batch import SpeculationCounts
from paged_kv.prefix.keeping import inner_salt
from paged_kv.server.engine.paged_model_provider import LoadedModel, ModelKey
from paged_kv.server.engine.sampling import Ending
from paged_kv.server.http.api_errors import APIError


@dataclass(frozen=True)
class HeldPrompt:
    """The first tokens of a prompt, which stay cached for so long after their last use."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TopToken:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a prompt.

    Attributes:
        logprob: its log probability behind those before it; None for the first token.
        rank: 1 if no token was likelier.
        top: the likeliest tokens in its place, the likeliest first.
    """

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model reads it.

    Attributes:
        tokens: of the whole prompt; not empty.
        segments: the same tokens in parts; other prompts may share the end of each part.
        initial_state: the kind of text that the model writes first: "normal" or "reasoning".
        media: the images in it. Such a prompt is computed alone.
        held: what clients ask to keep cached for some time.
    """

    tokens: list[int]
    segments: list[list[int]]
    initial_state: str = "normal"
    media: PromptMedia | None = None
    held: tuple[HeldPrompt, ...] = ()

    @property
    def cache_key(self) -> list[int]:
        """The tokens; image tokens differ by the image's content."""
        return self.tokens if self.media is None else self.media.cache_key


class Channel:
    """Receives the events of a request, in the event loop that made it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()


_numbers = count()


@dataclass(eq=False)
class Job:
    """One prompt and the choices to generate for it. A request has one or several jobs.

    Attributes:
        request_id: of the HTTP request.
        read: makes the prompt of the job for that model; may be slow.
        arguments: mlx-lm's, within their bounds.
        choices: how many continuations to generate.
        first_choice: its number in the request.
        salt: only jobs with the same salt share prompts; `Unstored` keeps them out of the store.
        channel: receives the events; None on ranks that have no clients.
        prompt: the prompt, if the model was loaded when the job was made.
        constraint: what each choice must fit; None for any text.
        compiled: the grammar of the constraint, if it was compiled for the model.
        priority: of waiting jobs, those with the lowest begin first.
        asked_tokens: `max_tokens` as the request has it, or the default. In `arguments` it is
            lowered to what fits.
        ending: the tokens that end a choice.
        prompt_logprobs: how many of the likeliest tokens to list for each token of the prompt, with
            its log probability; None if these are not asked for.
        session: that the prompt is part of.
        stage: the generation thread sets it and the fields that follow.
        cached_tokens: tokens of the prompt that hit a cached prefix.
        scored: the prompt's tokens so far, if their log probabilities are asked for.
        generated_tokens: of all choices.
        speculation: counts the drafts of all choices.
        number: names the job, on all ranks.
    """

    request_id: str
    model: ModelKey
    read: Callable[[Job, LoadedModel], Prompt]
    arguments: GenerationArguments
    choices: int
    first_choice: int
    salt: Hashable
    channel: Channel | None
    prompt: Prompt | None = None
    constraint: Constraint | CallConstraint | None = None
    compiled: CompiledGrammar | None = None
    priority: int = 0
    asked_tokens: int = 0
    ending: Ending = field(default_factory=Ending)
    prompt_logprobs: int | None = None
    session: str | None = None
    stage: Literal["waiting", "running"] = "waiting"
    cached_tokens: int = 0
    scored: list[ScoredToken] = field(default_factory=list)
    generated_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    since: float = field(default_factory=monotonic)
    number: int = field(default_factory=_numbers.__next__)

    @property
    def numbers(self) -> range:
        return range(self.first_choice, self.first_choice + self.choices)

    @property
    def computes_nothing(self) -> bool:
        """Whether there is nothing to generate, and nothing to tell of the prompt."""
        return not self.arguments.max_tokens and self.prompt_logprobs is None

    @property
    def is_limited(self) -> bool:
        """Whether fewer tokens of each choice fit than were asked for."""
        return self.arguments.max_tokens < self.asked_tokens

    def is_of(self, session: str, salt: Hashable) -> bool:
        """Whether the prompt is part of a session of prompts with a salt."""
        return (self.session, inner_salt(self.salt)) == (session, salt)

    def __getstate__(self) -> dict[str, Any]:
        """What other ranks get: they have no clients, and the prompt is read. They compile the
        grammar themselves."""
        return vars(self) | {"channel": None, "read": None, "compiled": None}


class Freed(Future[int]):
    """How many blocks' worth of tokens the end of a session frees. On ranks that have no clients
    nobody waits for it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Freed, ()


@dataclass(frozen=True, slots=True)
class Begun:
    """A job runs on the loaded model."""

    job: Job
    loaded: LoadedModel


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of a prompt's `total` tokens are computed."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a choice.

    Attributes:
        choice: its number in the request.
        logprob: log probability, if requested.
        top: the likeliest tokens, the likeliest first, if requested.
        finish_reason: "stop" or "length" if this is the last token.
        is_text: whether it is one of the answer's text; not of thoughts, calls or their marks.
    """

    choice: int
    token: int
    logprob: float | None = None
    top: tuple[TopToken, ...] = ()
    finish_reason: str | None = None
    is_text: bool = True


@dataclass(frozen=True, slots=True)
class Empty:
    """A choice of a job whose `max_tokens` is 0: it has ended, without a token."""

    choice: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The job has failed; no event follows."""

    error: APIError


Event = Begun | Progress | Token | Empty | Failed
