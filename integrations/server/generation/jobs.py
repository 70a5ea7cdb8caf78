"""What the threads of clients hand to the generation thread, and what it hands back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Any

from mlx_lm.server import GenerationArguments, Vision

from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel, ModelKey
from paged_kv.integrations.server.http.api_errors import APIError


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model reads it.

    Attributes:
        tokens: all of it; not empty.
        segments: the same in parts, after each of which others may go on.
        initial_state: what the model writes first, such as "normal" or "reasoning".
        vision: the images in it.
    """

    tokens: list[int]
    segments: list[list[int]]
    initial_state: str = "normal"
    vision: Vision | None = None

    @property
    def cache_key(self) -> list[int]:
        """The tokens, with those of images told apart by what is to be seen."""
        return self.tokens if self.vision is None else self.vision.cache_key


class Channel:
    """Where the events of a request arrive, in the event loop that made it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()


class Stage(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Job:
    """One prompt, and the choices that are asked for it. A request has one or several.

    Attributes:
        request_id: of the HTTP request.
        model: what it asks.
        read: makes the prompt for that model; maybe slow.
        arguments: how to generate, as mlx-lm has it; in their bounds.
        choices: how many continuations.
        first_choice: the number of the first of them in the request.
        salt: prompts are shared among jobs of the same salt.
        channel: where to send events.
        prompt: what was read, if the model was loaded when the job was made.
        stage: see `Stage`; the generation thread sets it, as all that follows.
        cached_tokens: of the prompt, that were not computed.
        generated_tokens: of all choices.
    """

    request_id: str
    model: ModelKey
    read: Callable[[LoadedModel], Prompt]
    arguments: GenerationArguments
    choices: int
    first_choice: int
    salt: str | None
    channel: Channel
    prompt: Prompt | None = None
    stage: Stage = Stage.WAITING
    cached_tokens: int = 0
    generated_tokens: int = 0
    since: float = field(default_factory=monotonic)


@dataclass(frozen=True, slots=True)
class Begun:
    """A job runs, on the model that is loaded."""

    job: Job
    loaded: LoadedModel


@dataclass(frozen=True, slots=True)
class Progress:
    """So many tokens of a prompt are computed."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the likeliest tokens."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a choice.

    Attributes:
        choice: its number in the request.
        token: the id.
        logprob: log probability, if it was asked.
        top: the likeliest tokens, the likeliest first, if they were asked.
        finish_reason: why this is the last one: "stop" or "length".
    """

    choice: int
    token: int
    logprob: float | None = None
    top: tuple[TopToken, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing more will come."""

    error: APIError


Event = Begun | Progress | Token | Failed


@dataclass
class Outbox:
    """Events on their way from the generation thread, sent together: to wake an event loop once
    for each of many would take longer than to make them."""

    _events: list[tuple[Channel, Event]] = field(default_factory=list)

    def put(self, job: Job, event: Event) -> None:
        """Send an event with the next `flush`."""
        self._events.append((job.channel, event))

    def flush(self) -> None:
        """Hand over what was put."""
        events, self._events = self._events, []
        loops: dict[Any, list[tuple[Channel, Event]]] = {}
        for channel, event in events:
            loops.setdefault(channel.loop, []).append((channel, event))
        for loop, its in loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, its)


def _deliver(events: list[tuple[Channel, Event]]) -> None:
    for channel, event in events:
        channel.events.put_nowait(event)
