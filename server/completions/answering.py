"""Answers a request of any interface, from its body to its last byte."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import (
    AsyncIterator,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged_kv.prefix.keeping import Published, Unstored
from paged_kv.server.completions.completion_plan import CompletionPlan, make_plan
from paged_kv.server.completions.conversation import Conversation
from paged_kv.server.completions.event_stream import EventStream
from paged_kv.server.completions.interface import Answers, Interface
from paged_kv.server.completions.service import Service
from paged_kv.server.engine.jobs import Channel, Job
from paged_kv.server.engine.paged_model_provider import LoadedModel, ModelKey
from paged_kv.server.http.access import salt_of
from paged_kv.server.http.api_errors import APIError, wrong_value
from paged_kv.server.http.request_body import read_body, while_connected
from paged_kv.server.http.request_log import request_id
from paged_kv.server.http.schema import Body, PrefillBody
from paged_kv.server.options import ServerOptions

log = logging.getLogger(__name__)

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Answering:
    """Answers the requests of one path.

    Args:
        service: the server's shared parts.
        interface: reads the requests and writes the answers.
    """

    def __init__(self, service: Service, interface: Interface) -> None:
        self._service = service
        self._interface = interface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, metrics = Request(scope, receive), self._service.metrics
        try:
            with self._service.gate.entered():
                await self._receive(request, send)
            metrics.answered[200] += 1
        except ClientDisconnect:
            log.info("the client has disconnected")
        except APIError as error:
            metrics.note_error(error)
            metrics.answered[error.status] += 1
            raise
        except Exception:
            metrics.answered[500] += 1
            raise

    async def _receive(self, request: Request, send: Send) -> None:
        service = self._service
        key = service.keys.require(request)
        with service.limits.entered(key):
            await self._serve(request, key, send)

    async def _serve(self, request: Request, key: str | None, send: Send) -> None:
        service, options = self._service, self._service.options
        content = await read_body(request, options.max_body_bytes, options.body_timeout)
        plan = partial(self._plan, content, key, request_id(), Channel())
        conversation = Conversation(service, await service.workers.read(plan, len(content)))
        try:
            with self._renaming():
                await while_connected(request.receive, self._answer(conversation, send))
        except ClientDisconnect:
            service.metrics.finished["abort"] += conversation.num_open
            raise

    def _plan(
        self, content: bytes, key: str | None, request_id: str, channel: Channel
    ) -> CompletionPlan:
        """Runs on a reader thread."""
        request = self._interface.read(content, key)
        with self._renaming():
            model, salt = self._admitted(request.body, key)
            return make_plan(request, model, salt, request_id, self._service.options, channel)

    def _admitted(self, body: Body, key: str | None) -> tuple[ModelKey, Hashable]:
        """The model that a client may use, and the salt of the prompts that it shares."""
        service = self._service
        service.limits.require_priority(key, body.priority or 0)
        model = service.names.key_of(body)
        body.model = service.names.public_name(body.model)
        is_handed = isinstance(body, PrefillBody)
        # The server that hands a prompt over has put its client's key into the salt.
        salt: Hashable = body.cache_salt if is_handed else salt_of(key, body.cache_salt)
        if body.store is False:
            salt = Unstored(salt)
        elif is_handed:
            _require_servers(service.options)
            salt = Published(salt)
        return model, salt

    @contextmanager
    def _renaming(self) -> Iterator[None]:
        """Put errors in the words of the interface, whose request is another one here."""
        try:
            yield
        except APIError as error:
            raise self._interface.renamed(error) from error

    async def _answer(self, conversation: Conversation, send: Send) -> None:
        if conversation.plan.body.stream:
            await self._stream(conversation, EventStream(send))
            return
        async with self._running(conversation) as answers:
            await conversation.finish()
            whole = partial(answers.whole, conversation.choices, conversation.usage)
            written = partial(json_bytes, whole)
            content = await self._service.workers.write(written, conversation.held_tokens)
            await send_json(content, send, _limit_header(conversation))

    @asynccontextmanager
    async def _running(self, conversation: Conversation) -> AsyncIterator[Answers]:
        """Wait until one of a request's jobs runs, and cancel them in the end; gives what writes
        the answers."""
        await self._make_ready(conversation.plan)
        with self._submitted(conversation.plan.jobs):
            await conversation.begin()
            yield self._answers(conversation)

    def _answers(self, conversation: Conversation) -> Answers:
        return conversation.plan.request.answers(request_id(), conversation.tokenizer)

    async def _make_ready(self, plan: CompletionPlan) -> None:
        """Read the prompts, if their model is loaded; else check that it can be loaded."""
        loaded, jobs = await self._service.loaded(), plan.jobs
        if loaded is not None and jobs[0].model == loaded.key:
            await self._read(plan, partial(_read_all, jobs, loaded))
        else:
            loaded = None
            await self._require_model(jobs[0].model)
        await self._service.grammars.prepare(jobs, loaded)

    async def _read_prompt(self, conversation: Conversation) -> Job:
        """Have the prompt of one job read that generates nothing."""
        plan = conversation.plan
        await self._make_ready(plan)
        (job,) = plan.jobs
        if job.prompt is None:
            # Another model reads it when it is loaded.
            job.arguments.max_tokens = 0
            with self._submitted(plan.jobs):
                await conversation.begin()
        return job

    async def _read(self, plan: CompletionPlan, work: Callable[[], None]) -> None:
        workers = self._service.workers
        if plan.has_images:
            await workers.read_images(work)
        else:
            await workers.read(work, plan.request.nbytes)

    async def _stream(self, conversation: Conversation, stream: EventStream) -> None:
        answers: Answers | None = None
        async with stream.kept_alive():
            try:
                async with self._running(conversation) as answers:
                    await self._send_events(conversation, answers, stream)
            except APIError as error:
                if not stream.has_begun:
                    raise
                self._service.metrics.note_error(error)
                failed = (answers or self._answers(conversation)).failed
                await stream.send(_streamed(partial(failed, self._interface.renamed(error))))

    async def _send_events(
        self, conversation: Conversation, answers: Answers, stream: EventStream
    ) -> None:
        begun = _streamed(partial(answers.begun, conversation.usage))
        await stream.send(begun, _limit_header(conversation))
        stream.idle = partial(_streamed, answers.idle)
        async for new in conversation.news():
            if isinstance(new, str):
                content = f": {new}\n\n".encode()
            else:
                written = partial(_streamed, partial(answers.news, new))
                # Log probabilities take their time.
                workers, count = self._service.workers, len(new.tokens)
                content = await workers.write(written, count) if count else written()
            await stream.send(content)
        await stream.send(_streamed(partial(answers.ended, conversation.usage)) + answers.last)

    async def _require_model(self, model: ModelKey) -> None:
        """Raise APIError unless a model can be loaded. The loaded model stays for now."""
        check = partial(self._service.thread.provider.check, model)
        await self._service.workers.read(check, sys.maxsize)

    @contextmanager
    def _submitted(self, jobs: Sequence[Job]) -> Iterator[None]:
        thread = self._service.thread
        thread.submit(jobs)
        try:
            self._service.require_healthy()
            yield
        finally:
            thread.cancel(jobs)


def _require_servers(options: ServerOptions) -> None:
    if not options.cache.has_servers:
        raise wrong_value(
            "this server shares no tier: start it with --store redis://... or s3://...", "prompt"
        )


def _read_all(jobs: Sequence[Job], loaded: LoadedModel) -> None:
    for number, job in enumerate(jobs):
        try:
            job.prompt = job.read(loaded)
        except APIError:
            raise
        except Exception as error:
            which = f"prompt {number}" if len(jobs) > 1 else "the prompt"
            raise wrong_value(f"{which} cannot be read: {error}") from error


def json_bytes(described: Callable[[], Mapping[str, Any]]) -> bytes:
    """JSON. The encoder of `json.dumps` would hold Python's lock until the end, and with it the
    event loop: log probabilities can have a million numbers."""
    return "".join(_JSON.iterencode(described())).encode()


def _streamed(described: Callable[[], Sequence[Mapping[str, Any]]]) -> bytes:
    """The events of a stream."""
    return b"".join(map(_event, described()))


def _event(described: Mapping[str, Any]) -> bytes:
    name = f"event: {described['type']}\n" if "type" in described else ""
    return b"%bdata: %b\n\n" % (name.encode(), json_bytes(lambda: described))


def _limit_header(conversation: Conversation) -> dict[str, str]:
    """Says how many tokens fit, where a request asked for more."""
    most = conversation.usage.max_tokens
    return {} if most is None else {"X-Max-Tokens": str(most)}


async def send_json(content: bytes, send: Send, headers: Mapping[str, str] | None = None) -> None:
    """Answer with 200 and this JSON."""
    response = Response(content, headers=headers, media_type="application/json")
    await response({"type": "http"}, _never, send)


async def _never() -> Any:
    raise AssertionError("a Response receives nothing")
