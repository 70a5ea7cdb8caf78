"""What the front does with what replicas answer, or fail to: with replicas that are made up."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.types import Message

from paged_kv.server.options import parsed_server_options
from paged_kv.server.replicas.front import MOST_TRIES, Front, merged_metrics
from paged_kv.server.replicas.placement import ForwardedRequest
from paged_kv.server.replicas.replica import WholeAnswer

pytestmark = pytest.mark.slow

STREAM = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"1")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"2")]
DIED = RayActorError()


def start(status: int = 200, headers: Any = JSON) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def whole(body: bytes, status: int = 200) -> list[Any]:
    return [[start(status), part(body, more=False)]]


@dataclass
class FakeReplicas:
    """A handle of replicas, each of which plays what it is given for each request."""

    plays: dict[str, list[Any]]
    choose: Callable[[ForwardedRequest], str]
    asked: list[ForwardedRequest] = field(default_factory=list)
    cancelled: int = 0
    all: list[Any] = field(default_factory=list)

    @property
    def answer(self) -> Any:
        return self

    def options(self, *, stream: bool) -> Any:
        assert stream
        return self

    def remote(self, request: ForwardedRequest) -> Any:
        self.asked.append(request)
        return FakeResponse(self, self.choose(request))

    def broadcast(self, method: str, request: ForwardedRequest) -> Any:
        assert method == "answer_whole"
        self.asked.append(request)
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s
        assert return_exceptions
        return self.all


class FakeResponse:
    def __init__(self, replicas: FakeReplicas, name: str) -> None:
        self._replicas = replicas
        self._name = name

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in [self._name, *self._replicas.plays[self._name]]:
            if isinstance(item, Exception):
                raise item
            if item == "wait":
                await asyncio.Event().wait()
            else:
                yield item

    def cancel(self) -> None:
        self._replicas.cancelled += 1


def in_turn(*names: str) -> Callable[[ForwardedRequest], str]:
    rest = list(names)
    return lambda _: rest.pop(0) if len(rest) > 1 else rest[0]


def not_avoided(*names: str) -> Callable[[ForwardedRequest], str]:
    """As the router chooses: the first that has not refused, or else the first."""
    return lambda request: next((each for each in names if each not in request.avoided), names[0])


@dataclass
class Got:
    """What a client got."""

    messages: list[Message]

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.messages)

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


def ask(
    replicas: FakeReplicas,
    path: str = "/v1/completions",
    body: bytes = b"{}",
    method: str = "POST",
    *,
    leaves: bool = False,
    options: Sequence[str] = (),
    on_message: Callable[[Message], object] = id,
) -> Got:
    arguments = parsed_server_options(["--model", "m", *options])
    app = Front(replicas, arguments).__serve_build_asgi_app__()
    scope = {
        "type": "http",
        "asgi": {},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }
    received = [{"type": "http.request", "body": body, "more_body": False}]
    got: list[Message] = []

    async def run() -> None:
        async def receive() -> Any:
            if received:
                return received.pop()
            if leaves:
                return {"type": "http.disconnect"}
            return await asyncio.Event().wait()

        async def send(message: Message) -> None:
            on_message(message)
            got.append(message)

        async with asyncio.timeout(20):
            await app(scope, receive, send)

    asyncio.run(run())
    return Got(got)


def test_an_answer_is_handed_on_as_it_comes() -> None:
    parts = [[start(200, STREAM), part(b"")], [part(b"data: 1\n\n"), part(b"data: 2\n\n")]]
    replicas = FakeReplicas({"a": [*parts, [part(b"", more=False)]]}, in_turn("a"))
    got = ask(replicas)
    assert [each.get("body") for each in got.messages[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]
    assert got.headers == {b"content-type": b"text/event-stream"}  # Ray Serve names the request
    assert not replicas.cancelled


@pytest.mark.parametrize(
    "before",
    [[], [[start()]], [[start(200, STREAM)], [part(b"")]]],
    ids=["nothing", "status", "no bytes"],
)
def test_a_request_whose_replica_dies_before_its_answer_goes_elsewhere(before: list[Any]) -> None:
    plays = {"a": [*before, DIED], "b": whole(b"{}")}
    replicas = FakeReplicas(plays, in_turn("a", "b"))
    got = ask(replicas)
    assert (got.status, got.body) == (200, b"{}")
    assert [each.avoided for each in replicas.asked] == [frozenset(), {"a"}]
    assert replicas.cancelled == 1


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/completions", b'data: {"error": {"message"'),
        ("/v1/chat/completions", b'data: {"error": {"message"'),
        ("/v1/messages", b'event: error\ndata: {"type": "error", "error": {"type": "api_error"'),
        ("/v1/responses", b'event: error\ndata: {"message"'),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error(path: str, end: bytes) -> None:
    begun = [[start(200, STREAM), part(b'event: x\ndata: {"n": 1}\n\nevent: x\ndata: {}\n\n')]]
    replicas = FakeReplicas({"a": [*begun, DIED], "b": whole(b"{}")}, in_turn("a", "b"))
    got = ask(replicas, path)
    last = got.messages[-1]
    assert len(replicas.asked) == 1
    assert last["more_body"] is False
    assert last["body"].startswith(end)
    if path == "/v1/responses":
        event = json.loads(last["body"].partition(b"data: ")[2])
        named = {"type": "error", "code": "replica_died", "sequence_number": 2}
        assert event | named == event
    assert b"send the request again" in last["body"]
    assert last["body"].endswith(b"\n\n")


def test_no_error_follows_a_stream_that_is_whole() -> None:
    begun = [[start(200, STREAM), part(b"data: {}\n\ndata: [DONE]\n\n")]]
    got = ask(FakeReplicas({"a": [*begun, DIED]}, in_turn("a")), "/v1/completions")
    assert (got.messages[-1]["body"], got.messages[-1]["more_body"]) == (b"", False)


def test_an_answer_that_is_no_stream_is_not_ended_as_if_it_were_whole() -> None:
    replicas = FakeReplicas({"a": [[start(), part(b'{"half')], DIED]}, in_turn("a"))
    with pytest.raises(Exception, match="response already started"):
        ask(replicas)


def test_an_answer_whose_replica_dies_after_its_end_is_whole() -> None:
    replicas = FakeReplicas({"a": [*whole(b"{}"), DIED]}, in_turn("a"))
    assert ask(replicas).body == b"{}"


def test_a_replica_that_refuses_is_passed_over() -> None:
    plays = {"a": whole(b"busy", 503), "b": whole(b"busy", 503), "c": whole(b"{}")}
    replicas = FakeReplicas(plays, not_avoided("a", "b", "c"))
    got = ask(replicas)
    assert (got.status, got.body) == (200, b"{}")
    assert replicas.asked[-1].avoided == {"a", "b"}


def test_where_all_refuse_a_client_gets_a_refusal() -> None:
    plays = {"a": whole(b"a is busy", 503), "b": whole(b"b is busy", 503)}
    replicas = FakeReplicas(plays, not_avoided("a", "b"))
    got = ask(replicas)
    assert (got.status, got.body) == (503, b"a is busy")
    assert len(replicas.asked) == 3


def test_other_errors_are_answers() -> None:
    replicas = FakeReplicas({"a": whole(b"wrong", 400)}, in_turn("a"))
    assert ask(replicas).status == 400
    assert len(replicas.asked) == 1


@pytest.mark.parametrize("error", [DIED, BackPressureError(1, 1)], ids=["died", "full"])
def test_tries_have_an_end(error: Exception) -> None:
    names = [f"r{number}" for number in range(50)]
    replicas = FakeReplicas({name: [error] for name in names}, in_turn(*names))
    got = ask(replicas)
    assert (got.status, got.code) == (503, "busy")
    assert len(replicas.asked) == MOST_TRIES


def test_a_client_that_leaves_cancels_its_request() -> None:
    replicas = FakeReplicas({"a": ["wait"]}, in_turn("a"))
    assert ask(replicas, leaves=True).messages == []
    assert replicas.cancelled == 1


def test_a_body_that_is_too_long_reaches_no_replica() -> None:
    replicas = FakeReplicas({}, in_turn("a"))
    got = ask(replicas, body=b"x" * 1001, options=["--max-body-bytes", "1000"])
    assert got.status == 413
    assert not replicas.asked


def answered(place: str, body: Any, status: int = 200) -> WholeAnswer:
    return WholeAnswer(place, status, JSON, json.dumps(body).encode())


def test_a_session_ends_everywhere() -> None:
    ended = {"id": "s", "object": "session.deleted", "deleted": True}
    missing = answered("c", {"error": {"code": "session_not_found"}}, 404)
    replicas = FakeReplicas({}, in_turn("a"))
    replicas.all = [
        answered("a", ended | {"freed_blocks": 2}),
        missing,
        DIED,
        answered("b", ended | {"freed_blocks": 3}),
    ]
    got = ask(replicas, "/v1/sessions/s", method="DELETE")
    assert json.loads(got.body) == ended | {"freed_blocks": 5}
    replicas.all = [missing, missing]
    got = ask(replicas, "/v1/sessions/s", method="DELETE")
    assert (got.status, got.code) == (404, "session_not_found")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_without_replicas_it_says_so(path: str) -> None:
    replicas = FakeReplicas({}, in_turn("a"), all=[DIED])
    got = ask(replicas, path, method="GET")
    assert (got.status, got.code) == (503, "busy")


def test_it_is_ready_once_one_replica_is() -> None:
    replicas = FakeReplicas({}, in_turn("a"))
    replicas.all = [answered("a", {"status": "not ready"}, 503), answered("b", {"status": "ready"})]
    got = ask(replicas, "/ready", method="GET")
    assert (got.status, json.loads(got.body)) == (200, {"status": "ready"})


def test_metrics_are_those_of_all_replicas() -> None:
    first = [
        "# HELP a what",
        "# TYPE a gauge",
        'a{model="m"} 1.0',
        "# HELP b_total",
        "# TYPE b_total counter",
        "b_total 2.0",
    ]
    text = "\n".join([*first, ""])
    assert merged_metrics({"x": text, "y": text.replace(" 1.0", " 7.0")}).splitlines() == [
        *first[:2],
        'a{replica="x",model="m"} 1.0',
        'a{replica="y",model="m"} 7.0',
        *first[3:5],
        'b_total{replica="x"} 2.0',
        'b_total{replica="y"} 2.0',
    ]
