"""Answers a request of any interface, from its body to its last byte."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from paged_kv.prefix.keeping import Published, Unstored
from paged_kv.server.completions.interface import Answers, Object, Reader, renaming
from paged_kv.server.completions.request_jobs import make_jobs, next_turn
from paged_kv.server.completions.request_state import RequestState
from paged_kv.server.completions.service import Service
from paged_kv.server.engine.choice_text import stop_machine
from paged_kv.server.engine.jobs import Channel, Job
from paged_kv.server.engine.paged_model_provider import LoadedModel, ModelKey
from paged_kv.server.http.access import salt_of
from paged_kv.server.http.api_errors import APIError, busy, wrong_value
from paged_kv.server.http.request_body import read_body, while_connected
from paged_kv.server.http.request_log import request_id
from paged_kv.server.http.schema import Body, ChatBody, PrefillBody

log = logging.getLogger(__name__)

# Clients and proxies give up connections on which nothing comes, and only bytes that cannot be sent
# tell a client that has left from one that has ended its side of the connection.
KEEPALIVE_S = 5.0

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class CompletionHandler:
    """Answers the requests of one path, whose bodies `read` understands."""

    def __init__(self, service: Service, read: Reader) -> None:
        self._service = service
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, service = Request(scope, receive), self._service
        try:
            with service.gate.entered():
                key = service.clients.require(request)
                with service.clients.entered(key):
                    await self._serve(request, key, send)
            service.metrics.answered[200] += 1
        except ClientDisconnect:
            log.info("the client has disconnected")
        except APIError as error:
            service.metrics.refused += error.status == 503
            service.metrics.answered[error.status] += 1
            raise
        except Exception:
            service.metrics.answered[500] += 1
            raise

    async def _serve(self, request: Request, key: str | None, send: Send) -> None:
        service, options = self._service, self._service.options
        content = await read_body(request, options.max_body_bytes, options.body_timeout)
        begin = partial(self._begin, content, key, request_id(), Channel())
        state = await service.workers.read(begin, len(content))
        try:
            with renaming(state.request.names):
                await while_connected(request.receive, self._answer(state, send))
        except ClientDisconnect:
            service.metrics.finished["abort"] += len(state.open)
            raise

    def _begin(
        self, content: bytes, key: str | None, request_id: str, channel: Channel
    ) -> RequestState:
        """Runs on a reader thread."""
        service, request = self._service, self._read(content, key)
        with renaming(request.names):
            model, salt = self._admitted(request.body, key)
            jobs = make_jobs(request, model, salt, request_id, service.options, channel)
            return RequestState(service, request, jobs, stop_machine(request.body.stop_words))

    def _admitted(self, body: Body, key: str | None) -> tuple[ModelKey, Hashable]:
        """The model that a client may use, and the salt of the prompts that it shares."""
        service = self._service
        service.clients.require_priority(key, body.priority or 0)
        model = service.names.key_of(body)
        body.model = service.names.public_name(body.model)
        is_handed = isinstance(body, PrefillBody)
        # The server that hands a prompt over has put its client's key into the salt.
        salt: Hashable = body.cache_salt if is_handed else salt_of(key, body.cache_salt)
        if body.store is False:
            salt = Unstored(salt)
        elif is_handed:
            if not service.options.cache.has_servers:
                raise wrong_value(
                    "this server shares no tier: start it with --store redis://... or s3://...",
                    "prompt",
                )
            salt = Published(salt)
        return model, salt

    async def _answer(self, state: RequestState, send: Send) -> None:
        if state.request.body.stream:
            await self._stream(state, EventStream(send))
            return
        async with self._running(state) as answers:
            await state.finish()
            scored = sum(len(each.tokens) + len(each.prompt or ()) for each in state.choices)
            content = await self._service.workers.write(
                lambda: _encoded(answers.whole(state.choices, state.usage)), scored
            )
            await _send_json(content, send, _limit_header(state))

    async def _stream(self, state: RequestState, stream: EventStream) -> None:
        answers: Answers | None = None
        async with stream.kept_alive():
            try:
                with renaming(state.request.names):
                    async with self._running(state) as answers:
                        await self._send_events(state, answers, stream)
            except APIError as error:
                if not stream.has_begun:
                    raise
                self._service.metrics.refused += error.status == 503
                await stream.send(_streamed((answers or _answers(state)).on_error, error))

    async def _send_events(
        self, state: RequestState, answers: Answers, stream: EventStream
    ) -> None:
        await stream.send(_streamed(answers.on_start, state.usage), _limit_header(state))
        stream.heartbeat = partial(_streamed, answers.heartbeat)
        async for new in state.deltas():
            if isinstance(new, str):
                content = f": {new}\n\n".encode()
            else:
                written = partial(_streamed, answers.on_delta, new)
                # Log probabilities take their time.
                workers, count = self._service.workers, len(new.tokens)
                content = await workers.write(written, count) if count else written()
            await stream.send(content)
        await stream.send(_streamed(answers.on_end, state.usage) + answers.last)

    @asynccontextmanager
    async def _running(self, state: RequestState) -> AsyncIterator[Answers]:
        """Wait until one of a request's jobs runs, and cancel them in the end; gives what writes
        the answers."""
        await self._make_ready(state)
        with self._submitted(state.jobs):
            await state.begin()
            answers = _answers(state)
            yield answers
        # Let the next turn of a chat be computed while nobody asks for anything.
        (job, *_), (choice, *_) = state.jobs, state.choices
        answer = answers.sent_back(choice)
        turn = next_turn(state.request, job, answer, self._service.options)
        if turn is not None:
            self._service.thread.prepare_next(turn)

    async def _make_ready(self, state: RequestState) -> None:
        """Read the prompts, if their model is loaded; else check that it can be loaded."""
        service, jobs = self._service, state.jobs
        loaded, request = await service.loaded(), state.request
        if loaded is not None and jobs[0].model == loaded.key:
            work = partial(_read_all, jobs, loaded)
            if isinstance(request.body, ChatBody) and request.body.has_images:
                await service.workers.read_images(work)
            else:
                await service.workers.read(work, request.nbytes)
        else:
            # The loaded model stays for now.
            loaded, check = None, partial(service.thread.provider.check, jobs[0].model)
            await service.workers.read(check, sys.maxsize)
        await service.prepare_grammars(jobs, loaded)

    @contextmanager
    def _submitted(self, jobs: Sequence[Job]) -> Iterator[None]:
        thread = self._service.thread
        thread.submit(jobs)
        try:
            self._service.require_healthy()
            yield
        finally:
            thread.cancel(jobs)


def _answers(state: RequestState) -> Answers:
    assert state.request.answers is not None, "something is generated"
    return state.request.answers(request_id(), state.tokenizer)


def _read_all(jobs: Sequence[Job], loaded: LoadedModel) -> None:
    for number, job in enumerate(jobs):
        try:
            job.prompt = job.read(job, loaded)
        except APIError:
            raise
        except Exception as error:
            which = f"prompt {number}" if len(jobs) > 1 else "the prompt"
            raise wrong_value(f"{which} cannot be read: {error}") from error


class PromptHandler(CompletionHandler):
    """Answers with what `describe` makes of a request's body, the tokens of its prompt, and their
    model."""

    def __init__(
        self,
        service: Service,
        read: Reader,
        describe: Callable[[Body, list[int], LoadedModel], Object],
    ) -> None:
        super().__init__(service, read)
        self._describe = describe

    async def _answer(self, state: RequestState, send: Send) -> None:
        await self._make_ready(state)
        (job,) = state.jobs
        if job.prompt is None:
            # Another model reads it when it is loaded.
            job.arguments.max_tokens = 0
            with self._submitted(state.jobs):
                await state.begin()
        loaded = self._service.thread.provider.loaded
        if job.prompt is None or loaded is None or loaded.key != job.model:
            raise busy("another model was loaded meanwhile: ask again")
        body, tokens = state.request.body, job.prompt.tokens
        content = await self._service.workers.read(
            lambda: _encoded(self._describe(body, tokens, loaded)), state.request.nbytes
        )
        await _send_json(content, send)


class EventStream:
    """Sends what a request gets as it comes, and a comment whenever nothing was sent for
    `KEEPALIVE_S`: while the request waits in line, while its prompt is computed, and while the
    model writes what can only be sent as a whole. Errors must be events once it `has_begun`; the
    bytes of a `heartbeat` follow each comment."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self.heartbeat: Callable[[], bytes] = bytes
        self._send = send
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()

    async def send(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send whole events or comments, the first with the head; `headers` are for the head, and
        are lost if it was sent before."""
        if self.has_begun and not content:
            return
        async with self._turn:
            if not self.has_begun:
                self.has_begun = True
                described = {"content-type": "text/event-stream", "cache-control": "no-cache"}
                await self._send(_head(described | dict(headers or {})))
            await self._send({"type": "http.response.body", "body": content, "more_body": True})
            self._sent_at = self._loop.time()

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send comments meanwhile, and then the end, unless an exception goes to the client."""
        keeping = asyncio.ensure_future(self._keep_alive())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
        await self._send({"type": "http.response.body", "body": b""})

    async def _keep_alive(self) -> None:
        while True:
            silent_s = self._loop.time() - self._sent_at
            if silent_s < KEEPALIVE_S:
                await asyncio.sleep(KEEPALIVE_S - silent_s)
            else:
                await self.send(b": keepalive\n\n" + self.heartbeat())


def _head(headers: Mapping[str, str]) -> dict[str, Any]:
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": encoded}


def _streamed(describe: Callable[..., Sequence[Object]], *arguments: Any) -> bytes:
    """What a function makes of arguments, as events."""
    events = describe(*arguments)
    names = [f"event: {each['type']}\n" if "type" in each else "" for each in events]
    return b"".join(
        b"%bdata: %b\n\n" % (name.encode(), _encoded(event))
        for name, event in zip(names, events, strict=True)
    )


def _encoded(described: Object) -> bytes:
    """JSON. The encoder of `json.dumps` would hold Python's lock until the end, and with it the
    event loop: log probabilities can have a million numbers."""
    return "".join(_JSON.iterencode(described)).encode()


def _limit_header(state: RequestState) -> dict[str, str]:
    """Says how many tokens fit, where a request asked for more."""
    most = state.usage.max_tokens
    return {} if most is None else {"X-Max-Tokens": str(most)}


async def _send_json(content: bytes, send: Send, headers: Mapping[str, str] | None = None) -> None:
    described = {"content-type": "application/json", "content-length": str(len(content))}
    await send(_head(described | dict(headers or {})))
    await send({"type": "http.response.body", "body": content})
