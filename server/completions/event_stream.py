"""A stream of events to one client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Send

# Clients and proxies give up connections on which nothing comes, and only bytes that cannot be sent
# tell a client that has left from one that has ended its side of the connection.
KEEPALIVE_S = 5.0


class EventStream:
    """Sends what a request gets as it comes, and a comment whenever nothing was sent for
    `KEEPALIVE_S`: while the request waits in line, while its prompt is computed, and while the
    model writes what can only be sent as a whole.

    Args:
        send: of ASGI.

    Attributes:
        has_begun: whether the client knows that this is a stream: errors must be events.
        heartbeat: the bytes that follow such a comment.
    """

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
                await self._send(_head(headers or {}))
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
    named = {"content-type": "text/event-stream", "cache-control": "no-cache", **headers}
    encoded = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    return {"type": "http.response.start", "status": 200, "headers": encoded}
