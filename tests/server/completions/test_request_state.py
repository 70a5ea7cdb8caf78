"""A request's events become its choices, and leave the event loop to others between them."""

import asyncio
import json
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from paged_kv.server.completions.answer_bodies import read_completion
from paged_kv.server.completions.handler import CompletionHandler, EventStream
from paged_kv.server.completions.interface import APIRequest
from paged_kv.server.completions.request_state import RequestState
from paged_kv.server.completions.service import WorkerThreads
from paged_kv.server.completions.short_hits import ShortHits
from paged_kv.server.engine.choice_text import stop_machine
from paged_kv.server.engine.jobs import Begun, Channel, Event, Failed, Job, Progress, Token
from paged_kv.server.engine.server_metrics import ServerMetrics
from paged_kv.server.http.api_errors import APIError, busy
from paged_kv.server.http.schema import Body, ChatBody, TextBody
from paged_kv.server.options import ServerOptions
from tests.server.engine.test_choice_text import END, WORDS, loaded

CHAT = {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}


def begun(count: int, body: Body) -> tuple[RequestState, Job]:
    """A request for so many choices that has begun."""
    prompt: Any = SimpleNamespace(tokens=[0], initial_state="normal", media=None)
    anything: Any = None
    job = Job("a", anything, anything, anything, count, 0, None, Channel(), prompt)
    service: Any = SimpleNamespace(
        metrics=ServerMetrics(), workers=WorkerThreads(), short_hits=ShortHits()
    )
    put(job, Begun(job, loaded()))
    return RequestState(service, APIRequest(body, 0), [job], stop_machine([])), job


def put(job: Job, event: Event) -> None:
    assert job.channel is not None
    job.channel.events.put_nowait(event)


def test_others_run_between_the_events_that_wait_for_a_request() -> None:
    """A hundred choices have a hundred events at once."""
    count, turns = 100, 0

    async def run() -> None:
        nonlocal turns
        state, job = begun(count, TextBody(prompt="a"))
        for number in job.numbers:
            put(job, Token(number, 0, finish_reason="length"))
        finished = asyncio.ensure_future(state.finish())
        while not finished.done():
            turns += 1
            await asyncio.sleep(0)
        assert [choice.text for choice in state.choices] == ["a"] * count

    asyncio.run(run())
    assert turns >= count


GOOD, BAD = ["<tool>", *WORDS[7:9], "</tool>"], ["<tool>", "d", "</tool>"]


@pytest.mark.parametrize(
    ("words", "more", "text", "calls", "reason"),
    [
        (["a", *GOOD], {}, "a", 1, "tool_calls"),
        (["a", *BAD, "b"], {}, "a<tool>d</tool>b", 0, "stop"),
        ([*BAD, *GOOD], {}, "<tool>d</tool>", 1, "tool_calls"),
        (GOOD[:2], {}, "".join(GOOD[:2]), 0, "stop"),
        ([*GOOD, "<tool>"], {"tool_choice": "auto"}, "<tool>", 1, "tool_calls"),
        (GOOD, {"tools": None}, "".join(GOOD), 0, "stop"),
        (GOOD, {"tool_choice": "none"}, "".join(GOOD), 0, "stop"),
    ],
)
def test_calls_that_are_none_are_text(
    words: list[str], more: Any, text: str, calls: int, reason: str
) -> None:
    async def run() -> None:
        state, job = begun(1, ChatBody.model_validate({**CHAT, **more}))
        for token in said(*words):
            put(job, token)
        put(job, Token(0, END, finish_reason="stop"))
        await state.finish()
        (choice,) = state.choices
        assert (choice.text, len(choice.calls), choice.finish_reason) == (text, calls, reason)

    asyncio.run(run())


class SkippedTime(asyncio.SelectorEventLoop):
    """An event loop in which nobody waits: while all sleep, its time is at once the next one at
    which anyone wakes up."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        own: Any = self
        if own._scheduled and not own._ready:
            self.now = max(self.now, own._scheduled[0].when())
        run_once: Any = super()._run_once  # type: ignore[misc]  # asyncio's own
        run_once()


async def later(seconds: float, *_: Any) -> None:
    await asyncio.sleep(seconds)


async def at_once(work: Any, _: int) -> Any:
    return work()


def sent_by(*events: tuple[float, Event]) -> list[tuple[float, Any]]:
    """What the client of a chat gets, and when: its events come so many seconds after each other,
    the first of them after the model was loaded, and a call takes 9 s to be parsed."""
    sent: list[tuple[float, Any]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        prompt: Any = SimpleNamespace(tokens=[0], initial_state="normal", held=(), media=None)
        arguments: Any = SimpleNamespace(max_tokens=9)
        anything: Any = None
        job = Job("a", anything, anything, arguments, 1, 0, None, Channel(), prompt)

        async def generate() -> None:
            for seconds, event in events:
                await asyncio.sleep(seconds)
                put(job, Begun(job, loaded()) if isinstance(event, Begun) else event)

        thread: Any = SimpleNamespace(
            provider=SimpleNamespace(check=id),
            submit=lambda _: generating.append(asyncio.ensure_future(generate())),
            cancel=lambda _: None,
            prepare_next=lambda _: None,
        )
        generating: list[Any] = []
        service: Any = SimpleNamespace(
            options=ServerOptions(),
            metrics=ServerMetrics(),
            thread=thread,
            loaded=partial(later, 4),
            prepare_grammars=partial(later, 0),
            workers=SimpleNamespace(read=at_once, write=partial(later, 9)),
            short_hits=ShortHits(),
            require_healthy=lambda: None,
        )

        async def send(message: Any) -> None:
            sent.append((loop.time(), message.get("body")))

        read = partial(read_completion, ChatBody)
        request = read(json.dumps({**CHAT, "stream": True}).encode(), None)
        state = RequestState(service, request, [job], stop_machine([]))
        await CompletionHandler(service, read)._stream(state, EventStream(send))

    with asyncio.Runner(loop_factory=SkippedTime) as runner:
        runner.run(run())
    return sent


ANY_BEGUN = Begun(None, None)  # type: ignore[arg-type]  # the job's own


def said(*words: str) -> list[Token]:
    return [Token(0, WORDS.index(word)) for word in words]


def test_a_stream_is_never_silent_for_long() -> None:
    """While its request waits in line, its prompt is computed, a call is written that nobody can
    read before its end, and that is parsed. Then texts come."""
    call = said("<tool>", *["d"] * 60, "</tool>")
    texts = said(*"abc" * 20)
    end = Token(0, WORDS.index("a"), finish_reason="length")
    tokens = [(0.5, each) for each in (*call, *texts)]
    sent = sent_by((14, ANY_BEGUN), (9, Progress(1, 2)), *tokens, (0, end))
    times = [0.0, *(at for at, _ in sent)]
    assert max(after - before for before, after in pairwise(times)) <= 6
    assert [at for at, _ in sent][:4] == [5, 5, 10, 15]
    assert [body for _, body in sent][:3] == [None, *[b": keepalive\n\n"] * 2]
    comments = sum(body == b": keepalive\n\n" for _, body in sent)
    assert comments < 15, "none where something is sent"
    assert sent[-2][1] == b"data: [DONE]\n\n"


def test_an_error_has_a_status_until_a_stream_has_begun() -> None:
    failed = Failed(busy("a secret"))
    with pytest.raises(APIError, match="secret"):
        sent_by((0.5, failed))
    sent = sent_by((2, failed))
    assert sent[1][1] == b": keepalive\n\n"
    assert json.loads(sent[-2][1].removeprefix(b"data: "))["error"]["code"] == "busy"
