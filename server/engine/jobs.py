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
    """A token of a prompt."""

    token: int
    logprob: float | None = None  # behind those before it; None for the first token
    rank: int | None = None  # 1 if no token was likelier
    top: tuple[TopToken, ...] = ()  # the likeliest tokens in its place, the likeliest first


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model reads it."""

    tokens: list[int]  # of the whole prompt; not empty
    # The same tokens in parts; other prompts may share the end of each part.
    segments: list[list[int]]
    initial_state: str = "normal"  # of the text that the model writes: or "reasoning"
    media: PromptMedia | None = None  # the images in it. Such a prompt is computed alone.
    held: tuple[HeldPrompt, ...] = ()  # what clients ask to keep cached for some time

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
    """One prompt and the choices to generate for it. A request has one or several jobs."""

    request_id: str
    model: ModelKey
    read: Callable[[Job, LoadedModel], Prompt]  # makes the prompt; may be slow
    arguments: GenerationArguments  # mlx-lm's, within their bounds
    choices: int  # how many continuations to generate
    first_choice: int  # its number in the request
    # Only jobs with the same salt share prompts; `Unstored` keeps them out of the store.
    salt: Hashable
    channel: Channel | None  # receives the events; None on ranks that have no clients
    prompt: Prompt | None = None  # None if the model was not loaded when the job was made
    constraint: Constraint | CallConstraint | None = None  # what each choice must fit
    compiled: CompiledGrammar | None = None  # of the constraint, if the model was loaded
    priority: int = 0  # of waiting jobs, those with the lowest begin first
    # `max_tokens` as the request has it, or the default. In `arguments` it is lowered to what fits.
    asked_tokens: int = 0
    ending: Ending = field(default_factory=Ending)  # the tokens that end a choice
    # How many of the likeliest tokens to list for each token of the prompt, with its log
    # probability; None if these are not asked for.
    prompt_logprobs: int | None = None
    session: str | None = None  # that the prompt is part of
    # The generation thread sets these.
    stage: Literal["waiting", "running"] = "waiting"
    cached_tokens: int = 0  # tokens of the prompt that hit a cached prefix
    scored: list[ScoredToken] = field(default_factory=list)  # of the prompt, if asked for
    generated_tokens: int = 0  # of all choices
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)  # of all choices
    since: float = field(default_factory=monotonic)
    number: int = field(default_factory=_numbers.__next__)  # names the job, on all ranks

    @property
    def numbers(self) -> range:
        return range(self.first_choice, self.first_choice + self.choices)

    @property
    def computes_nothing(self) -> bool:
        """Whether there is nothing to generate, and nothing to tell of the prompt."""
        return not self.arguments.max_tokens and self.prompt_logprobs is None

    @property
    def is_limited(self) -> bool:
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
    """A token of a choice."""

    choice: int  # its number in the request
    token: int
    logprob: float | None = None  # log probability, if requested
    top: tuple[TopToken, ...] = ()  # the likeliest tokens, the likeliest first, if requested
    finish_reason: str | None = None  # "stop" or "length" if this is the last token
    is_text: bool = True  # one of the answer's text; not of thoughts, calls or their marks


@dataclass(frozen=True, slots=True)
class Empty:
    """A choice of a job whose `max_tokens` is 0: it has ended, without a token."""

    choice: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The job has failed; no event follows."""

    error: APIError


Event = Begun | Progress | Token | Empty | Failed
