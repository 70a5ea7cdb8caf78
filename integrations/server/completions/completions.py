"""Answers a request for completions, from its body to its last byte."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged_kv.commands.cache_options import has_servers
from paged_kv.integrations.server.completions.answer_bodies import Answers, ChatAnswers, TextAnswers
from paged_kv.integrations.server.completions.completion_plan import Plan, make_plan
from paged_kv.integrations.server.completions.conversation import Conversation
from paged_kv.integrations.server.completions.service import Service
from paged_kv.integrations.server.generation.jobs import Channel, Job
from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel, ModelKey
from paged_kv.integrations.server.http.access import salt_of
from paged_kv.integrations.server.http.api_errors import APIError, wrong_value
from paged_kv.integrations.server.http.request_body import parse_body, read_body
from paged_kv.integrations.server.http.request_log import request_id
from paged_kv.integrations.server.http.schema import DEFAULT_MODEL, Body, PrefillBody, TextBody
from paged_kv.prefix.keeping import Published, Unstored

log = logging.getLogger(__name__)

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Completions:
    """Answers the requests of one path.

    Args:
        service: the server's shared parts.
        kind: the schema of bodies.
    """

    def __init__(self, service: Service, kind: type[Body]) -> None:
        self._service = service
        self._kind = kind

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
        service, options = self._service, self._service.options
        key = service.keys.require(request)
        content = await read_body(request, options.max_body_bytes, options.body_timeout)
        planned = partial(self._planned, content, key, request_id(), Channel())
        plan = await service.workers.read(planned, len(content))
        talk = Conversation(service, plan)
        try:
            await _while_connected(request.receive, self._answer(talk, plan, len(content), send))
        except ClientDisconnect:
            service.metrics.finished["abort"] += talk.num_open
            raise

    def _planned(self, content: bytes, key: str | None, name: str, channel: Channel) -> Plan:
        """Runs on a reader thread."""
        service = self._service
        body = parse_body(content, self._kind)
        model = service.names.key_of(body)
        salt: Hashable = salt_of(key, body.cache_salt)
        if body.store is False:
            salt = Unstored(salt)
        elif isinstance(body, PrefillBody):
            _require_servers(service.options)
            salt = Published(salt)
        return make_plan(body, model, salt, name, service.options, channel)

    async def _answer(self, talk: Conversation, plan: Plan, nbytes: int, send: Send) -> None:
        service, jobs = self._service, plan.jobs
        loaded = await service.loaded()
        if loaded is not None and jobs[0].model == loaded.key:
            await self._read(plan, partial(_read_all, jobs, loaded), nbytes)
        else:
            await self._require_model(jobs[0].model)
        with self._submitted(jobs):
            await talk.begin()
            answers = _answers(plan.body, talk.tokenizer)
            if plan.body.stream:
                await self._stream(talk, answers, plan.body, send)
            else:
                await talk.finish()
                await self._send_whole(talk, answers, send)

    async def _read(self, plan: Plan, work: Callable[[], None], nbytes: int) -> None:
        workers = self._service.workers
        await (workers.read_images(work) if plan.has_images else workers.read(work, nbytes))

    async def _send_whole(self, talk: Conversation, answers: Answers, send: Send) -> None:
        written = partial(_written, partial(answers.whole, talk.choices, talk.usage))
        content = await self._service.workers.write(written, talk.held_tokens)
        response = Response(content, media_type="application/json")
        await response({"type": "http"}, _never, send)

    async def _stream(self, talk: Conversation, answers: Answers, body: Body, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events(talk, answers, body):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(
        self, talk: Conversation, answers: Answers, body: Body
    ) -> AsyncIterator[bytes]:
        try:
            async for new in talk.news():
                if isinstance(new, str):
                    yield f": {new}\n\n".encode()
                elif new.tokens:
                    written = partial(_written, partial(answers.chunk, new))
                    yield _event(await self._service.workers.write(written, len(new.tokens)))
                else:
                    yield _event(_written(partial(answers.chunk, new)))
        except APIError as error:
            self._service.metrics.note_error(error)
            yield _event(_written(error.as_dict))
            return
        if body.includes_usage:
            yield _event(_written(partial(answers.usage_chunk, talk.usage)))
        yield b"data: [DONE]\n\n"

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


def _require_servers(options: argparse.Namespace) -> None:
    if not has_servers(options.store):
        raise wrong_value(
            "this server shares no tier: start it with --store redis://... or s3://...", "prompt"
        )


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run work for a client whose request was received completely.

    Raises:
        ClientDisconnect: the client has left, and the work was cancelled.
    """
    left = asyncio.ensure_future(_disconnected(receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({left, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        left.cancel()
        working.cancel()
        await asyncio.gather(left, working, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _read_all(jobs: Sequence[Job], loaded: LoadedModel) -> None:
    for number, job in enumerate(jobs):
        try:
            job.prompt = job.read(loaded)
        except APIError:
            raise
        except Exception as error:
            which = f"prompt {number}" if len(jobs) > 1 else "the prompt"
            raise wrong_value(f"{which} cannot be read: {error}") from error


def _answers(body: Body, tokenizer: Any) -> Answers:
    model = body.model or DEFAULT_MODEL
    if isinstance(body, TextBody):
        is_listed = not isinstance(body.logprobs, bool) and body.logprobs is not None
        return TextAnswers(request_id(), model, tokenizer, is_listed=is_listed)
    return ChatAnswers(request_id(), model, tokenizer)


def _written(described: Callable[[], dict[str, Any]]) -> bytes:
    """JSON. The encoder of `json.dumps` would hold Python's lock until the end, and with it the
    event loop: log probabilities can have a million numbers."""
    return "".join(_JSON.iterencode(described())).encode()


def _event(content: bytes) -> bytes:
    return b"data: %b\n\n" % content


async def _never() -> Any:
    raise AssertionError("a JSONResponse receives nothing")
