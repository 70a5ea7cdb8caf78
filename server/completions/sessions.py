"""Ends the sessions that requests name, and frees what only their prompts have cached."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_kv.server.completions.service import Service
from paged_kv.server.engine.jobs import SessionEnd
from paged_kv.server.http.access import salt_of

PATH = "/v1/sessions"


class Sessions:
    """Answers requests to end sessions.

    Args:
        service: the server's shared parts.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def end(self, request: Request) -> Response:
        """End a session of the client's key and the query's `cache_salt`.

        Raises:
            APIError: 401, 503, or 404 if none of these has such a session.
        """
        service, name = self._service, request.path_params["name"]
        salt = salt_of(service.keys.require(request), request.query_params.get("cache_salt"))
        with service.gate.entered():
            await service.loaded()
            ended = SessionEnd(name, salt)
            service.thread.end_session(ended)
            service.require_healthy()
            # The thread answers also where nobody waits any more.
            freed = await asyncio.shield(asyncio.wrap_future(ended.freed))
        described = {"id": name, "object": "session.deleted", "deleted": True}
        return JSONResponse(described | {"freed_blocks": freed})
