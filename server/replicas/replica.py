"""One server of several, which gets its requests from the front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message

from paged_kv.integrations.mlx_lm_internals import downloaded
from paged_kv.server.app import make_app
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.http.api_errors import busy
from paged_kv.server.lifecycle import make_service, require_loaded
from paged_kv.server.options import ServerOptions
from paged_kv.server.replicas.agreement import identity_of
from paged_kv.server.replicas.forwarded_request import ForwardedRequest
from paged_kv.server.replicas.rank_actors import start_ranks
from paged_kv.server.server_command import prepare_process

log = logging.getLogger(__name__)


class WholeAnswer(NamedTuple):
    """What one replica answers to a request that goes to all."""

    place: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replica:
    """A server without a socket, made by Ray Serve.

    Args:
        options: of `paged-kv server`.
        agreement: a handle of `Agreement`.

    Raises:
        ValueError, OSError: the model cannot be loaded, or the replica differs from others.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: ServerOptions, agreement: DeploymentHandle
    ) -> None:
        prepare_process(options)
        self.place: str = serve.get_replica_context().replica_id.unique_id
        # A replica keeps its other ranks: Ray ends actors that nobody can call.
        self._ranks = await start_ranks(options)
        provider = PagedModelProvider(options)
        self._service = make_service(options, provider, self.place)
        self._app = make_app(self._service)
        thread = self._service.thread
        thread.start()
        try:
            await run_in_threadpool(require_loaded, thread, provider)
            folder = None if options.model is None else downloaded(options.model)
            identity = await run_in_threadpool(identity_of, folder)
            await agreement.require_same.remote(self.place, identity)
        except BaseException:
            provider.ranks.abandon()
            self._end()
            raise

    def check_health(self) -> None:
        """Raise RuntimeError if the generation thread has died: Ray Serve then starts another
        replica in the place of this one."""
        if not self._service.is_healthy:
            raise RuntimeError("the generation thread has died")

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[str | list[Message]]:
        """Yields the name of this replica, and then messages of ASGI. If the caller cancels, the
        request ends as if its client had left."""
        yield self.place
        async for messages in _answered(self._app, request):
            yield messages

    async def answer_whole(self, request: ForwardedRequest) -> WholeAnswer:
        """The same, of a request whose answers are put together."""
        messages = [each async for some in _answered(self._app, request) for each in some]
        body = b"".join(each.get("body", b"") for each in messages)
        return WholeAnswer(self.place, messages[0]["status"], messages[0]["headers"], body)

    async def __del__(self) -> None:
        """Store cached prefixes and end. Ray Serve calls this when the requests have ended, or
        their time has."""
        if hasattr(self, "_service"):
            refusal = busy("the replica is shutting down: ask again")
            self._service.gate.close(refusal)
            self._service.thread.refuse(refusal)
            await run_in_threadpool(self._end)

    def _end(self) -> None:
        self._service.thread.stop()
        self._service.thread.join()
        self._service.workers.close()


async def _answered(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
    """Yields the messages that an application sends, as many at once as there are. An application
    whose messages nobody takes any more is told that its client has left."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    received: asyncio.Queue[Message] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": request.body, "more_body": False})
    running = asyncio.ensure_future(_run(app, request, received, sent))
    try:
        message = await sent.get()
        while message is not None:
            messages = [message]
            while not sent.empty() and (message := sent.get_nowait()) is not None:
                messages.append(message)
            yield messages
            if message is not None:
                message = await sent.get()
    finally:
        received.put_nowait({"type": "http.disconnect"})
        await running


async def _run(
    app: ASGIApp,
    request: ForwardedRequest,
    received: asyncio.Queue[Message],
    sent: asyncio.Queue[Message | None],
) -> None:
    try:
        await app(dict(request.scope), received.get, sent.put)
    except Exception:
        # Its client has got an answer, or a part of one.
        log.exception("the application has failed")
    finally:
        sent.put_nowait(None)
