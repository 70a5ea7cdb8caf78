"""Collects the choices of one request from the events of the generation thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from mlx_lm.generate import TextStateMachine

from paged_kv.server.completions.interface import APIRequest, Choice, Usage
from paged_kv.server.completions.service import Service
from paged_kv.server.completions.tool_calls import ChoiceCalls
from paged_kv.server.engine.choice_text import ChoiceText, Delta
from paged_kv.server.engine.jobs import Begun, Empty, Event, Failed, Job, Progress, Token
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.schema import Body, ChatBody, TextBody


class RequestState:
    """The choices of a request, as far as they are generated. The caller submits its jobs, one for
    each prompt; `stops` finds the stop texts.

    Attributes:
        choices: all choices, in order.
        open: the numbers of those that have not ended.
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
        assert jobs[0].channel is not None, "a client waits for the events"
        self._events = jobs[0].channel.events
        self._began = monotonic()
        self._begun: dict[int, _BegunChoice] = {}
        self.open = {choice.index for choice in self.choices}
        self._has_token = False

    @property
    def usage(self) -> Usage:
        prompts = [job.prompt for job in self.jobs if job.prompt is not None]
        limits = [job.arguments.max_tokens for job in self.jobs if job.is_limited]
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

    async def begin(self) -> None:
        """Wait until one of the jobs runs. Raises APIError: a job was refused."""
        while not self._begun:
            self._delta(await self._events.get())

    async def finish(self) -> None:
        """Wait until all choices are complete. Raises APIError: something went wrong."""
        async for _ in self.deltas():
            pass

    async def deltas(self) -> AsyncIterator[Choice | str]:
        """New parts of choices as they come, and texts that tell of the prompts' progress. Raises
        APIError: something went wrong."""
        is_streamed = bool(self._body.stream)
        while self.open:
            if not self._events.empty():
                # Else the event loop would not get on before all waiting events are done.
                await asyncio.sleep(0)
            event = await self._events.get()
            delta = self._delta(event)
            if isinstance(event, Progress):
                yield f"keepalive {event.done}/{event.total}"
            elif isinstance(event, Token | Empty) and delta is not None:
                new = await self._part(event.choice, delta)
                if not new.is_empty:
                    # What is sent is kept for the next turn, without its log probabilities.
                    kept = replace(new, tokens=[], prompt=None) if is_streamed else new
                    self.choices[new.index].add(kept)
                    yield new
        self._service.metrics.whole_request.note(monotonic() - self._began)

    async def _part(self, number: int, delta: Delta) -> Choice:
        """What a part of a choice adds. It has the tokens of those before that added nothing, and
        the first one has what the request asks for of its prompt."""
        begun = self._begun[number]
        calls, text = await begun.calls.take(delta)
        reason = delta.finish_reason
        if reason == "stop" and begun.calls.num_calls:
            reason = "tool_calls"
        if reason is not None:
            self.open.remove(number)
            self._service.metrics.finished[reason] += 1
        new = Choice(number, text, delta.reasoning, calls, reason, stop_text=delta.stop_text)
        begun.tokens += delta.tokens
        if new.is_empty:
            return new
        new.tokens, begun.tokens = begun.tokens, []
        if not self.choices[number].is_empty:
            return new
        first = first_part(self._body, begun.job, number, self.tokenizer)
        first.add(new)
        return first

    def _delta(self, event: Event) -> Delta | None:
        """What an event adds to a choice, if it does."""
        match event:
            case Failed(error):
                raise error
            case Begun(job, loaded):
                self._record_begun(job, loaded)
            case Empty():
                return Delta(finish_reason="length")
            case Token() if event.choice in self.open:
                return self._record_token(event)
        # A choice that ended at a stop word may still get a few tokens: ignore them.
        return None

    def _record_begun(self, job: Job, loaded: LoadedModel) -> None:
        self.tokenizer = loaded.tokenizer
        assert job.prompt is not None, "a job has begun"
        lists_end = isinstance(self._body, TextBody) and bool(self._body.echo)
        # Those that the answer may call.
        tools: list[dict[str, Any]] = []
        if isinstance(self._body, ChatBody):
            self._service.short_hits.record(self._body, job, loaded.tokenizer)
            if self._body.tool_choice != "none":
                tools = self._body.tools or []
        workers, is_streamed = self._service.workers, bool(self._body.stream)
        state, least = job.prompt.initial_state, job.ending.min_tokens
        more = {"has_tools": bool(tools), "lists_end": lists_end}
        for number in job.numbers:
            text = ChoiceText(loaded, state, self._stops, least, **more)
            calls = ChoiceCalls(workers, loaded.tokenizer, tools, is_streamed)
            self._begun[number] = _BegunChoice(job, text, calls)

    def _record_token(self, token: Token) -> Delta:
        now, metrics = monotonic(), self._service.metrics
        if not self._has_token:
            metrics.first_token.note(now - self._began)
            self._has_token = True
        choice, begun = self.choices[token.choice], self._begun[token.choice]
        if not choice.count:
            begun.first_token = now
        choice.count += 1
        delta = begun.text.take(token)
        choice.reasoning_count += delta.is_reasoning
        if delta.finish_reason is None:
            return delta
        if choice.count > 1:
            metrics.output_token.note((now - begun.first_token) / (choice.count - 1))
        if token.finish_reason is None:
            self._service.thread.cancel_choice(begun.job, token.choice)
        return delta


@dataclass
class _BegunChoice:
    job: Job
    text: ChoiceText
    calls: ChoiceCalls
    # The time of its first token.
    first_token: float = 0.0
    # Those with log probabilities that no part has had yet.
    tokens: list[Token] = field(default_factory=list)


def first_part(body: Body, job: Job, number: int, tokenizer: Any) -> Choice:
    """What a choice has before its first token: of the prompt."""
    choice = Choice(number, prompt=job.scored if body.prompt_logprobs is not None else None)
    if isinstance(body, TextBody) and body.echo:
        assert job.prompt is not None, "the choice has begun"
        prompt = body.prompts[job.first_choice // job.choices]
        choice.text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        if job.arguments.logprobs:
            most = job.arguments.top_logprobs
            choice.tokens = [
                Token(number, each.token, each.logprob, each.top[:most]) for each in job.scored
            ]
    return choice
