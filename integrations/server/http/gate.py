"""Lets requests in while the server accepts them, and counts those in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged_kv.integrations.server.http.api_errors import APIError


class Gate:
    """Open until `close`. All of this runs in one event loop.

    Attributes:
        inside: the number of requests in progress.
    """

    def __init__(self) -> None:
        self.inside = 0
        self._refusal: APIError | None = None
        self._closed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_open(self) -> bool:
        """Whether requests are let in."""
        return self._refusal is None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Count a request as in progress.

        Raises:
            APIError: the error that the gate was closed with.
        """
        if self._refusal is not None:
            raise self._refusal
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    def close(self, refusal: APIError) -> None:
        """Refuse all later requests; the error of the first call counts."""
        self._refusal = self._refusal or refusal
        self._closed.set()

    async def while_open(self, event: asyncio.Future[Any]) -> None:
        """Wait for an event, for as long as the gate is open.

        Raises:
            APIError: the error that the gate was closed with, before the event.
            Exception: the event's.
        """
        closed = asyncio.ensure_future(self._closed.wait())
        await asyncio.wait({event, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if self._refusal is not None and not event.done():
            raise self._refusal
        event.result()

    async def wait_until_empty(self) -> None:
        """Wait until no request is in progress."""
        await self._empty.wait()
