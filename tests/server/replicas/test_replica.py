"""How a replica hands on what its application sends."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

pytest.importorskip("ray", reason="needs the extra ray")

from paged_kv.server.replicas.forwarded_request import ForwardedRequest
from paged_kv.server.replicas.replica import _answered

pytestmark = pytest.mark.slow

REQUEST = ForwardedRequest({"type": "http", "path": "/x"}, b"a body")


def part(number: int) -> Message:
    return {"type": "http.response.body", "body": b"%d" % number, "more_body": number < 5}


def test_an_application_is_told_that_its_client_has_left() -> None:
    """It may count that, and ends the request's computation."""
    told: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(part(1))
        told.append(await receive())

    async def run() -> None:
        answers = _answered(app, REQUEST)
        await anext(answers)
        assert not told
        await answers.aclose()  # type: ignore[attr-defined]  # a generator

    asyncio.run(run())
    assert told == [{"type": "http.disconnect"}]


def test_an_application_that_fails_ends_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(part(1))
        raise ZeroDivisionError

    async def run() -> list[list[Message]]:
        return [messages async for messages in _answered(app, REQUEST)]

    assert asyncio.run(run()) == [[part(1)]]
    assert "ZeroDivisionError" in caplog.text
