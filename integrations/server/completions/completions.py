"""Answers a request for completions, from its body to its last byte."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from paged_kv.integrations.server.completions.answer_bodies import Answers, ChatAnswers, TextAnswers
from paged_kv.integrations.server.completions.completion_plan import jobs_of
from paged_kv.integrations.server.completions.conversation import Conversation
from paged_kv.integrations.server.completions.service import Service
from paged_kv.integrations.server.generation.jobs import Job
from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel, ModelKey
from paged_kv.integrations.server.http.access import salt_of
from paged_kv.integrations.server.http.api_errors import APIError, wrong_value
from paged_kv.integrations.server.http.client_presence import while_connected, within
from paged_kv.integrations.server.http.request_body import parse_body, read_body
from paged_kv.integrations.server.http.request_log import request_id
from paged_kv.integrations.server.http.schema import DEFAULT_MODEL, Body, TextBody

log = logging.getLogger(__name__)


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
        request = Request(scope, receive)
        try:
            with self._service.gate.entered():
                await self._receive(request, send)
        except ClientDisconnect:
            self._service.metrics.finished["abort"] += 1
            log.info("the client has disconnected")

    async def _receive(self, request: Request, send: Send) -> None:
        service, options = self._service, self._service.options
        key = service.keys.require(request)
        content = await read_body(request, options.max_body_bytes, options.body_timeout)
        body = parse_body(content, self._kind)
        model = service.names.key_of(body)
        salt = salt_of(key, body.cache_salt)
        jobs = jobs_of(body, model, salt, request_id(), options)
        send = within(send, options.write_timeout)
        await while_connected(request.receive, self._answer(body, jobs, len(content), send))

    async def _answer(self, body: Body, jobs: list[Job], nbytes: int, send: Send) -> None:
        service = self._service
        loaded = await service.loaded()
        if loaded is not None and jobs[0].model == loaded.key:
            await service.readers.run(partial(_read_all, jobs, loaded), nbytes)
        else:
            await self._require_model(jobs[0].model)
        with self._submitted(jobs):
            talk = Conversation(service, jobs, body)
            await talk.begin()
            answers = _answers(body, talk.tokenizer)
            if body.stream:
                await self._stream(talk, answers, body, send)
            else:
                await talk.finish()
                response = JSONResponse(answers.whole(talk.choices, talk.usage))
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
                else:
                    yield _event(answers.chunk(new))
        except APIError as error:
            yield _event(error.as_dict())
            return
        if body.includes_usage:
            yield _event(answers.usage_chunk(talk.usage))
        yield b"data: [DONE]\n\n"

    async def _require_model(self, model: ModelKey) -> None:
        """Raise APIError unless a model can be loaded. The loaded model stays for now."""
        check = partial(self._service.thread.provider.check, model)
        try:
            await self._service.readers.run(check, sys.maxsize)
        except Exception as error:
            raise APIError(
                404,
                f"the model {model[0]!r} cannot be loaded: {error}",
                param="model",
                code="model_not_found",
            ) from error

    @contextmanager
    def _submitted(self, jobs: Sequence[Job]) -> Iterator[None]:
        thread = self._service.thread
        thread.submit(jobs)
        try:
            self._service.require_healthy()
            yield
        finally:
            thread.cancel(jobs)


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


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


async def _never() -> Any:
    raise AssertionError("a JSONResponse receives nothing")
