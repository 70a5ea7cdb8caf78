"""Collects the choices of one request from the events of the generation thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from mlx_lm.generate import TextStateMachine

from paged_kv.server.completions.interface import APIRequest, Choice, Usage
from paged_kv.server.completions.prompt_logprobs import first_part
from paged_kv.server.completions.service import Service
from paged_kv.server.completions.tool_calls import ChoiceCalls
from paged_kv.server.engine.choice_text import ChoiceText, Delta
from paged_kv.server.engine.jobs import (
    Begun,
    Empty,
    Event,
    Failed,
    Job,
    Progress,
    Token,
)
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.schema import Body, ChatBody, TextBody


class RequestState:
    """The choices of a request, as far as they are generated.

    Args:
        service: the server's shared parts.
        request: as its interface has read it.
        jobs: one for each prompt; the caller submits them.
        stops: finds the stop texts.

    Attributes:
        request, jobs: as given.
        choices: all choices, in order.
        tokenizer: the model's; None until `begin` has returned.
    """

    def __init__(
        self, service: Service, request: APIRequest, jobs: list[Job], stops: TextStateMachine
    ) -> None:
        self.request, self.jobs = request, jobs
        self.choices = [Choice(number) for job in jobs for number in job.numbers]
        self.tokenizer: Any = None
        self._service = service
        self._body, self._stops = request.body, stops
        channel = jobs[0].channel
        assert channel is not None, "a client waits for the events"
        self._events = channel.events
        self._began = monotonic()
        # For each choice that has begun: its text, its tool calls, and the time of its first token.
        self._texts: dict[int, ChoiceText] = {}
        self._calls: dict[int, ChoiceCalls] = {}
        self._first_token: dict[int, float] = {}
        self._open = {choice.index for choice in self.choices}
        self._shown: set[int] = set()

    @property
    def usage(self) -> Usage:
        """The token counts so far."""
        prompts = [job.prompt for job in self.jobs if job.prompt is not None]
        limits = [most for job in self.jobs if (most := job.fitting_tokens) is not None]
        return Usage(
            sum(len(prompt.tokens) for prompt in prompts),
            sum(job.cached_tokens for job in self.jobs),
            sum(choice.count for choice in self.choices),
            sum(job.speculation.accepted_tokens for job in self.jobs),
            sum(job.speculation.draft_tokens for job in self.jobs),
            sum(choice.reasoning_count for choice in self.choices),
            tuple(held for prompt in prompts for held in prompt.held),
            min(limits, default=None),
        )

    @property
    def num_open(self) -> int:
        """The number of choices that have not ended."""
        return len(self._open)

    @property
    def held_tokens(self) -> int:
        """The number of tokens in `choices`, whose log probabilities were asked for."""
        return sum(len(choice.tokens) + len(choice.prompt or ()) for choice in self.choices)

    async def begin(self) -> None:
        """Wait until one of the jobs runs.

        Raises:
            APIError: a job was refused.
        """
        while not self._texts:
            self._take(await self._events.get())

    async def finish(self) -> None:
        """Wait until all choices are complete.

        Raises:
            APIError: something went wrong.
        """
        async for new in self.deltas():
            if isinstance(new, Choice):
                self.choices[new.index].add(new)

    async def deltas(self) -> AsyncIterator[Choice | str]:
        """New parts of choices as they come, and texts that tell of the prompts' progress.

        Raises:
            APIError: something went wrong.
        """
        held: dict[int, list[Token]] = {}
        while self._open:
            if not self._events.empty():
                # Else the event loop would not get on before all waiting events are done.
                await asyncio.sleep(0)
            event = await self._events.get()
            delta = self._take(event)
            if isinstance(event, Progress):
                yield f"keepalive {event.done}/{event.total}"
            elif isinstance(event, Token | Empty) and delta is not None:
                new = await self._part(event.choice, delta)
                held.setdefault(event.choice, []).extend(delta.tokens)
                if not new.is_empty:
                    new.tokens = held.pop(event.choice)
                    yield self._with_prompt(new)
        self._service.metrics.whole_request.note(monotonic() - self._began)

    def _with_prompt(self, new: Choice) -> Choice:
        """A new part of a choice; the first one has what the request asks for of its prompt."""
        if new.index in self._shown:
            return new
        self._shown.add(new.index)
        job = self._job_of(new.index)
        first = first_part(self._body, job, new.index, self.tokenizer)
        first.add(new)
        return first

    async def _part(self, number: int, delta: Delta) -> Choice:
        choice_calls = self._calls[number]
        calls, text = await choice_calls.take(delta)
        reason = delta.finish_reason
        if reason == "stop" and choice_calls.num_calls:
            reason = "tool_calls"
        if reason is not None:
            self._open.remove(number)
            self._service.metrics.finished[reason] += 1
        return Choice(number, text, delta.reasoning, calls, reason, stop_text=delta.stop_text)

    def _take(self, event: Event) -> Delta | None:
        match event:
            case Failed(error):
                raise error
            case Begun(job, loaded):
                self._record_begun(job, loaded)
            case Empty():
                return Delta(finish_reason="length")
            case Token() if event.choice in self._open:
                return self._record_token(event)
        # A choice that ended at a stop word may still get a few tokens: ignore them.
        return None

    def _record_begun(self, job: Job, loaded: LoadedModel) -> None:
        self.tokenizer = loaded.tokenizer
        assert job.prompt is not None, "a job has begun"
        lists_end = isinstance(self._body, TextBody) and bool(self._body.echo)
        tools = _callable_tools(self._body)
        if isinstance(self._body, ChatBody):
            self._service.system_texts.note(self._body.messages, job)
        for number in job.numbers:
            self._texts[number] = ChoiceText(
                loaded,
                job.prompt.initial_state,
                self._stops,
                job.ending.min_tokens,
                has_tools=bool(tools),
                lists_end=lists_end,
            )
            self._calls[number] = ChoiceCalls(
                self._service.call_parser, loaded.tokenizer, tools, bool(self._body.stream)
            )

    def _record_token(self, token: Token) -> Delta:
        now, metrics = monotonic(), self._service.metrics
        if not self._first_token:
            metrics.first_token.note(now - self._began)
        self._first_token.setdefault(token.choice, now)
        choice = self.choices[token.choice]
        choice.count += 1
        delta = self._texts[token.choice].take(token)
        choice.reasoning_count += delta.is_reasoning
        if delta.finish_reason is None:
            return delta
        if choice.count > 1:
            took = now - self._first_token[token.choice]
            metrics.output_token.note(took / (choice.count - 1))
        if token.finish_reason is None:
            self._service.thread.cancel_choice(self._job_of(token.choice), token.choice)
        return delta

    def _job_of(self, choice: int) -> Job:
        (job,) = [job for job in self.jobs if choice in job.numbers]
        return job


def _callable_tools(body: Body) -> list[dict[str, Any]]:
    """The tools that the answer may call."""
    if not isinstance(body, ChatBody) or body.tool_choice == "none":
        return []
    return body.tools or []
