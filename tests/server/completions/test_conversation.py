"""A request's events become its choices, and leave the event loop to others between them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from paged_kv.server.completions import conversation
from paged_kv.server.completions.choices import Choice
from paged_kv.server.completions.completion_plan import CompletionPlan
from paged_kv.server.completions.conversation import Conversation
from paged_kv.server.completions.interface import ReadRequest
from paged_kv.server.completions.tool_calls import CallParser
from paged_kv.server.completions.worker_threads import WorkerThreads
from paged_kv.server.engine.choice_text import stop_machine
from paged_kv.server.engine.jobs import Begun, Channel, Event, Job, Token
from paged_kv.server.engine.server_metrics import ServerMetrics
from paged_kv.server.http.schema import TextBody
from tests.server.engine.test_choice_text import loaded


def begun(count: int) -> tuple[Conversation, Job]:
    """A request for so many choices that has begun, of a text without another body."""
    prompt: Any = SimpleNamespace(tokens=[0], initial_state="normal")
    anything: Any = None
    job = Job("a", anything, anything, anything, count, 0, None, Channel(), prompt)
    service: Any = SimpleNamespace(metrics=ServerMetrics(), call_parser=CallParser(WorkerThreads()))
    request = ReadRequest(TextBody(prompt="a"), anything, 0)
    plan = CompletionPlan(request, [job], stop_machine([]))
    put(job, Begun(job, loaded()))
    return Conversation(service, plan), job


def put(job: Job, event: Event) -> None:
    assert job.channel is not None
    job.channel.events.put_nowait(event)


def test_others_run_between_the_events_that_wait_for_a_request() -> None:
    """A hundred choices have a hundred events at once."""
    count, turns = 100, 0

    async def run() -> None:
        nonlocal turns
        talk, job = begun(count)
        for number in job.numbers:
            put(job, Token(number, 0, finish_reason="length"))
        finished = asyncio.ensure_future(talk.finish())
        while not finished.done():
            turns += 1
            await asyncio.sleep(0)
        assert [choice.text for choice in talk.choices] == ["a"] * count

    asyncio.run(run())
    assert turns >= count


def test_a_stream_in_which_nothing_happens_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "KEEPALIVE_S", 0.01)

    async def run() -> None:
        talk, job = begun(1)
        news = talk.news()
        assert [await anext(news) for _ in range(2)] == ["keepalive"] * 2
        put(job, Token(0, 0, finish_reason="length"))
        rest = [new.text async for new in news if isinstance(new, Choice)]
        assert rest == ["a"]

    asyncio.run(run())
