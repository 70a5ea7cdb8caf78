"""Gives every request an id, which its log lines and its answer carry, and refuses those on
connections beyond the limit.

Log lines hold what clients sent, such as paths. `OneLine` keeps that from looking like other lines,
and from reaching a terminal as control characters.
"""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar
from time import monotonic
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

PROBES = ("/health", "/ready")
# In the state of a request on an extra connection: the error that answers it unless it is a probe.
REFUSAL = "refusal"
HEADER = "X-Request-Id"
FORMAT = "%(asctime)s - %(levelname)s - %(request_id)s%(message)s"

_current: ContextVar[str] = ContextVar("request_id", default="")
_PLAIN = re.compile(rb"[\w.:-]{1,64}", re.ASCII)


def request_id() -> str:
    """The id of the present request."""
    return _current.get()


class OneLine(logging.Formatter):
    """Formats a record as one line with the id of the present request, and its traceback, if it
    has one, as indented lines below."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        name = _current.get()
        record.request_id = f"{name}: " if name else ""
        record.message = _printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


class RequestLog:
    """Gives requests ids, and logs the answer to each. On connections beyond the limit it answers
    only probes, and closes these.

    A client may choose the id with the request header of the same name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, status = _given(scope) or uuid.uuid4().hex, 0
        refusal = scope.get("state", {}).get(REFUSAL)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers[HEADER] = name
                if refusal is not None:
                    headers["Connection"] = "close"
            await send(message)

        is_served = refusal is None or scope["path"] in PROBES
        token, began = _current.set(name), monotonic()
        try:
            await (self._app if is_served else refusal.response())(scope, receive, named)
        finally:
            outcome = status or "gone"
            took = monotonic() - began
            log.info("%s %s: %s in %.3f s", scope["method"], scope["path"], outcome, took)
            _current.reset(token)


def _given(scope: Scope) -> str | None:
    wanted = HEADER.lower().encode()
    for key, value in scope["headers"]:
        if key == wanted and _PLAIN.fullmatch(value):
            return str(value.decode())
    return None


def _printable(text: str) -> str:
    """The text with escapes in the place of control characters, line ends and the like."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {_printable(line)}" for line in text.split("\n"))
