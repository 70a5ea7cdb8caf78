"""Gives every request an id, which its log lines and its answer carry."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar
from time import monotonic

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

HEADER = "X-Request-Id"
FORMAT = "%(asctime)s - %(levelname)s - %(request_id)s%(message)s"

_current: ContextVar[str] = ContextVar("request_id", default="")
_PLAIN = re.compile(rb"[\w.:-]{1,64}", re.ASCII)


def request_id() -> str:
    """The id of the present request."""
    return _current.get()


class RequestIds(logging.Filter):
    """Adds the id of the present request to log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps every record."""
        name = _current.get()
        record.request_id = f"{name}: " if name else ""
        return True


class RequestLog:
    """Gives requests ids, and logs the answer to each.

    A client may choose the id with the request header of the same name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _given(scope) or uuid.uuid4().hex
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        token, began = _current.set(name), monotonic()
        try:
            await self._app(scope, receive, named)
        finally:
            said = status or "gone"
            took = monotonic() - began
            log.info("%s %s: %s in %.3f s", scope["method"], scope["path"], said, took)
            _current.reset(token)


def _given(scope: Scope) -> str | None:
    wanted = HEADER.lower().encode()
    for key, value in scope["headers"]:
        if key == wanted and _PLAIN.fullmatch(value):
            return str(value.decode())
    return None
