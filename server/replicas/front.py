"""The address of several replicas: hands each request to one of them, or to all. A router, in the
same process, lets Ray Serve send requests where their prefixes are.

A request whose replica dies, or refuses it with 503, goes to another one as long as its client has
got nothing. A stream that has begun ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from paged_kv.server.app import error_response
from paged_kv.server.completions.service import SESSIONS
from paged_kv.server.http.api_errors import APIError, busy
from paged_kv.server.http.request_body import read_body, while_connected
from paged_kv.server.http.request_log import HEADER, PROBES
from paged_kv.server.messages import messages
from paged_kv.server.options import ServerOptions
from paged_kv.server.replicas.placement import (
    ForwardedRequest,
    Placement,
    Progress,
    forwarded_request,
)
from paged_kv.server.replicas.replica import WholeAnswer
from paged_kv.server.responses import responses

log = logging.getLogger(__name__)

# How often a request is tried at most. Ray Serve itself waits where no replica is left.
MOST_TRIES = 10

# How long all replicas have for what goes to all, which none computes for.
ALL_S = 20.0

# A longer body is read on a thread: the event loop serves all clients.
LARGE_BYTES = 100_000

FAILURES = (RayError, RayServeException)

_SAMPLE = r"([\w:]+)(?:\{(.*)\})? (.*)"


class Front:
    """The application of the front, made by Ray Serve with a handle of `Replica`."""

    def __init__(self, replicas: DeploymentHandle, options: ServerOptions) -> None:
        self._all = replicas
        self._one = replicas.options(stream=True)
        self._options = options

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(
            routes=[
                *[Route(path, self._probe) for path in PROBES],
                Route("/metrics", self._metrics),
                Route(f"{SESSIONS}/{{name:path}}", self._end_session, methods=["DELETE"]),
                Mount("/", self._forward),
            ],
            exception_handlers={APIError: error_response, Exception: error_response},
        )

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application: one replica answers."""
        request = Request(scope, receive)
        try:
            forwarded = await self._read(request)
            answer = _Answer(scope["path"], send)
            await while_connected(receive, self._answer(forwarded, answer))
        except ClientDisconnect:
            log.info("the client has disconnected")

    async def _answer(self, request: ForwardedRequest, answer: _Answer) -> None:
        tried: set[str] = set()
        for _ in range(MOST_TRIES):
            try:
                progress = Progress()
                attempt = replace(request, avoided=frozenset(tried), progress=progress)
                async for sent in self._sent(attempt):
                    if isinstance(sent, str):
                        answer.restart(is_last=sent in tried)
                        tried.add(sent)
                        continue
                    progress.has_ended = is_last(sent[-1])
                    for message in sent:
                        await answer.send(message)
                    progress.has_begun = answer.has_begun
            except FAILURES as error:
                log.warning("a replica has failed: %s", error)
                if answer.has_begun and not progress.has_ended:
                    await answer.break_off()
            if answer.has_begun:
                return
        raise busy(f"{len(tried)} replicas have failed to answer: ask again later")

    async def _sent(self, request: ForwardedRequest) -> AsyncIterator[Any]:
        """What `Replica.answer` yields. It is told when nobody waits any more."""
        response = self._one.answer.remote(request)
        try:
            async for sent in response:
                yield sent
        except BaseException:
            response.cancel()
            raise

    async def _read(self, request: Request) -> ForwardedRequest:
        options = self._options
        body = await read_body(request, options.max_body_bytes, options.body_timeout)
        if len(body) < LARGE_BYTES:
            return forwarded_request(request.scope, body)
        return await asyncio.to_thread(forwarded_request, request.scope, body)

    async def _of_all(self, request: Request) -> list[WholeAnswer]:
        """What each replica answers; those that fail are left out, and if all do it raises 503."""
        forwarded = await self._read(request)
        try:
            results = self._all.broadcast("answer_whole", forwarded)
            found = await results.results_async(timeout_s=ALL_S, return_exceptions=True)
        except (*FAILURES, TimeoutError) as error:
            raise busy(f"no replica answers: {error}") from error
        answers = [each for each in found if isinstance(each, WholeAnswer)]
        if not answers:
            raise busy("no replica answers: ask again later")
        return answers

    async def _probe(self, request: Request) -> Response:
        # Good if one replica is.
        return _as_response(min(await self._of_all(request), key=lambda each: each.status))

    async def _metrics(self, request: Request) -> Response:
        answers = await self._of_all(request)
        for answer in answers:
            if answer.status != 200:
                return _as_response(answer)
        texts = {answer.place: answer.body.decode() for answer in answers}
        merged = WholeAnswer("", 200, answers[0].headers, merged_metrics(texts).encode())
        return _as_response(merged)

    async def _end_session(self, request: Request) -> Response:
        """End a session everywhere, as its requests may have gone to several replicas."""
        answers = await self._of_all(request)
        ended = [json.loads(answer.body) for answer in answers if answer.status == 200]
        if not ended:
            return _as_response(answers[0])
        freed = sum(each["freed_blocks"] for each in ended)
        return JSONResponse(ended[0] | {"freed_blocks": freed})


class _Answer:
    """What a client gets of the answers of replicas, one after the other.

    Attributes:
        has_begun: whether the client has got something, so that no other answer may follow.
    """

    def __init__(self, path: str, send: Send) -> None:
        self.has_begun = False
        self._path = path
        self._send = send
        self._start: Message = {}
        self._is_last = False
        self._is_done = False
        self._events = 0

    def restart(self, *, is_last: bool) -> None:
        """Take what follows as a new answer; the last one may be a refusal."""
        self._start = {}
        self._is_last = is_last

    async def send(self, message: Message) -> None:
        """Send a message on, unless it is part of a refusal after which others are asked. Nothing
        is sent before the first bytes of the body."""
        if message["type"] == "http.response.start":
            self._start = {**message, "headers": _headers(message["headers"])}
        elif self._start["status"] != 503 or self._is_last:
            if not self.has_begun and message.get("more_body") and not message["body"]:
                return
            if not self.has_begun:
                self.has_begun = True
                await self._send(self._start)
            body = message.get("body", b"")
            self._events += body.count(b"\ndata: {")
            self._is_done |= body.endswith(b"data: [DONE]\n\n")
            await self._send(message)

    async def break_off(self) -> None:
        """End a stream whose replica has died with an error in the form of its interface, unless
        the client has got all of it.

        Raises:
            APIError: the answer is no stream; the connection is closed.
        """
        error = APIError(
            500,
            "the replica that computed this answer has died: send the request again",
            code="replica_died",
        )
        if dict(self._start["headers"]).get(b"content-type") != b"text/event-stream":
            raise error
        body = b"" if self._is_done else b"%bdata: %b\n\n" % self._event(error)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _event(self, error: APIError) -> tuple[bytes, bytes]:
        described, name = error.as_dict(), b"event: error\n"
        if self._path.startswith(messages.PATH):
            described = messages.error_body(error)
        elif self._path.startswith(responses.PATH):
            # As OpenAI names it: https://platform.openai.com/docs/api-reference/responses-streaming
            described = {**described["error"], "type": "error", "sequence_number": self._events}
        else:
            name = b""
        return name, json.dumps(described, ensure_ascii=False).encode()


def is_last(message: Message) -> bool:
    """Whether no message of an answer follows. ASGI's messages need not say so."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def merged_metrics(texts: dict[str, str]) -> str:
    """The metrics of several replicas, in Prometheus's text format (version 0.0.4), as one text, in
    which each has a label `replica`."""
    families: dict[str, list[str]] = {}
    for place, text in texts.items():
        family: list[str] = []
        for line in text.splitlines():
            if not line.startswith("#"):
                name, labels, rest = re.fullmatch(_SAMPLE, line).groups()  # type: ignore[union-attr]  # the format
                more = f",{labels}" if labels else ""
                family.append(f'{name}{{replica="{place}"{more}}} {rest}')
            elif line.startswith("# HELP"):
                family = families.setdefault(line, [line])
            elif line not in family:
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _as_response(answer: WholeAnswer) -> Response:
    headers = {
        name.decode(): value.decode()
        for name, value in _headers(answer.headers)
        if name != b"content-length"
    }
    return Response(answer.body, answer.status, headers)


def _headers(headers: Iterable[Sequence[bytes]]) -> list[Sequence[bytes]]:
    """Those of an answer but its id, which Ray Serve names too."""
    return [each for each in headers if each[0].lower() != HEADER.lower().encode()]


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not all there
    """Routes each `ForwardedRequest`, the first argument of a call; see `Placement`.

    It is made by Ray Serve, in the process of the front. With several fronts each has one, and
    learns where prefixes are from the requests that it routes itself.
    """

    # A busy replica is late to say how many requests it has. It is asked for its prefixes, and
    # another one would compute them.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self) -> None:
        self._placement = Placement()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica a rank, which is asked only if those before it are full."""
        assert pending_request is not None, "Serve routes requests"
        request: ForwardedRequest = pending_request.args[0]
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        if not replicas:
            return []
        # Where none may answer, any does: its answer says what is missing.
        able = [each for each in replicas if each not in request.avoided] or [*replicas]
        if request.place in replicas:
            able = [request.place]
        ranked = self._placement.ranked(request.trail, able)
        name = pending_request.metadata.internal_request_id
        self._placement.expect(name, request, ranked[0])
        end = self._placement.end

        def end_cancelled(chosen: asyncio.Future[Any]) -> None:
            if chosen.cancelled():
                end(name)

        pending_request.future.add_done_callback(end_cancelled)
        return [[replicas[each]] for each in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        request: ForwardedRequest = pending_request.args[0]
        name = pending_request.metadata.internal_request_id
        self._placement.begin(name, request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placement.end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._placement.use([each.replica_id.unique_id for each in replicas])
