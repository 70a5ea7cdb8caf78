"""Extends uvicorn's HTTP/1.1 protocol by a limit of connections, a time limit for headers, and
errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_kv.integrations.server.http.api_errors import APIError, busy, wrong_value


class Connection(H11Protocol):
    """One client. `limited` gives it limits.

    Attributes:
        max_connections: the most connections at once; more get 503.
        header_timeout_s: seconds that a request's header may take to arrive, from the opening of
            the connection or from its first byte.
    """

    max_connections: int
    header_timeout_s: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        # Without TCP_NODELAY each part of an answer waits for the client's acknowledgement of the
        # part before, 40 ms on Linux. asyncio sets it only for sockets that name their protocol.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.max_connections:
            self._refuse(
                busy(
                    f"{self.max_connections} connections are open, the most allowed: ask again "
                    "later, or start the server with a larger --max-connections"
                )
            )
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        # Idle: no complete header has arrived since the last request.
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP; if an answer has begun, close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(wrong_value(msg))
        else:
            self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._note_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_slow(self) -> None:
        self._refuse(
            APIError(
                408,
                f"the header of a request did not arrive in {self.header_timeout_s:g} s",
                code="timeout",
            )
        )

    def _refuse(self, error: APIError) -> None:
        if self.transport.is_closing():
            return
        self._stop_timer()
        content = json.dumps(error.as_dict()).encode()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Connection": "close",
            **error.headers,
        }
        lines = [f"HTTP/1.1 {error.status} ", *[f"{name}: {headers[name]}" for name in headers]]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        self.transport.close()


def limited(max_connections: int, header_timeout_s: float) -> type[Connection]:
    """A class of connections with these limits, as uvicorn makes connections without arguments."""
    limits = {"max_connections": max_connections, "header_timeout_s": header_timeout_s}
    return type("LimitedConnection", (Connection,), limits)
