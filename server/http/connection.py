"""Extends uvicorn's HTTP/1.1 protocol by a limit of connections, time limits for clients that send
or read slowly, answers to clients that have ended their side, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_kv.lru import LRU
from paged_kv.server.http.api_errors import APIError, busy, wrong_value
from paged_kv.server.http.request_log import REFUSAL

log = logging.getLogger(__name__)

# Connections beyond the limit that may ask for probes.
MOST_EXTRA = 16

# The time to the first question whether a client still reads; each next one takes twice as long.
FIRST_QUESTION_S = 0.1

# asyncio hands over 256 KiB at once. In chunks of one byte each, as a client may send a body, these
# keep the event loop for seconds; others have their turn after each part.
MOST_READ_BYTES = 4096

_CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")


class Connection(H11Protocol):
    """One client. `limited` gives it limits.

    Beyond `max_connections` it gets an extra place, in which only probes are served. When these are
    taken too, the oldest of them is dropped: whoever holds connections cannot keep an orchestrator
    from its probe.

    Attributes:
        max_connections: the most connections at once that are served.
        header_timeout_s: seconds that a request's header may take to arrive, from the opening of
            the connection or from its first byte.
        write_timeout_s: seconds that what was sent may take to leave this process, as the client
            reads it. Later the connection is dropped.
        extra: the connections beyond the limit, the oldest first.
    """

    max_connections: int
    header_timeout_s: float
    write_timeout_s: float
    extra: ClassVar[LRU[Connection, None]]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Without TCP_NODELAY each part of an answer waits for the client's acknowledgement of the
        # part before, 40 ms on Linux. asyncio sets it only for sockets that name their protocol.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.max_size = MOST_READ_BYTES
        # So asyncio pauses writing while any byte is unsent, and the time of `_unread` counts.
        transport.set_write_buffer_limits(high=0)
        self._slow = _Deadline(self.loop, self.header_timeout_s, self._note_slow)
        self._unread = _Deadline(self.loop, self.write_timeout_s, self._note_unread)
        self._question = _Deadline(self.loop, FIRST_QUESTION_S, self._ask)
        self._has_ended = False
        if len(self.connections) - len(self.extra) > self.max_connections:
            self._take_extra_place()
        self._slow.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Idle: no complete header has arrived since the last request.
        if self.conn.their_state is h11.IDLE:
            self._slow.start()
        elif not self._is_answered:
            self._slow.stop()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's always closes
        """Whether to keep the connection of a client that sends nothing more: for its answer."""
        is_waiting = self.cycle is not None and not self._is_answered
        self._has_ended = is_waiting and not self.cycle.more_body
        if self._has_ended:
            self._ask()
        return self._has_ended

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        for deadline in (self._slow, self._unread, self._question):
            deadline.stop()
        self.extra.pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """After an answer: serve the next request that has arrived, or wait for it."""
        super().on_response_complete()
        if self._is_answered and self._has_ended:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:
            # Let the client send the rest of its body, without which many read no answer.
            self._slow.start()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP; if an answer has begun, close the connection."""
        self._refuse(wrong_value(msg))

    @property
    def _is_answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def _take_extra_place(self) -> None:
        for oldest, _ in self.extra.put(self, None):
            oldest.transport.abort()
        refusal = busy(
            f"{self.max_connections} connections are open, the most allowed: ask again later, or "
            "start the server with a larger --max-connections"
        )
        self.app_state = {**self.app_state, REFUSAL: refusal}

    def _ask(self) -> None:
        """Find out whether a client that has ended its side still reads. One that has left answers
        any bytes with a reset, and the next bytes cannot be sent. These bytes say nothing: clients
        take any number of interim responses (RFC 9110, section 15.2). Once an answer has begun, its
        parts do the same."""
        if self.conn.our_state is not h11.SEND_RESPONSE or self.transport.is_closing():
            return
        if self.conn.their_http_version != b"1.1":
            # There it cannot ask. Proxies end their side of HTTP/1.0 when their client has left.
            self.transport.close()
            return
        self.transport.write(self.conn.send(_CONTINUE))
        self._question.start()
        self._question.seconds *= 2

    def _note_unread(self) -> None:
        log.info("a client did not read what was sent to it in %g s", self.write_timeout_s)
        self.transport.abort()

    def _note_slow(self) -> None:
        self._refuse(
            APIError(
                408,
                f"the header of a request did not arrive in {self.header_timeout_s:g} s",
                code="timeout",
            )
        )

    def _refuse(self, error: APIError) -> None:
        """Close the connection, with an error if no answer has begun."""
        if self.transport.is_closing():
            return
        self._slow.stop()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
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


def limited(
    max_connections: int, header_timeout_s: float, write_timeout_s: float
) -> type[Connection]:
    """A class of connections with these limits, as uvicorn makes connections without arguments."""
    limits = {
        "max_connections": max_connections,
        "header_timeout_s": header_timeout_s,
        "write_timeout_s": write_timeout_s,
        "extra": LRU[Connection, None](MOST_EXTRA),
    }
    return type("LimitedConnection", (Connection,), limits)


class _Deadline:
    """Calls `missed` unless it is stopped within `seconds` of its start."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, missed: Callable[[], None]
    ) -> None:
        self.seconds = seconds
        self._loop = loop
        self._missed = missed
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to count, unless it counts already."""
        if self._timer is None:
            self._timer = self._loop.call_later(self.seconds, self._miss)

    def stop(self) -> None:
        """Count no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _miss(self) -> None:
        self._timer = None
        self._missed()
