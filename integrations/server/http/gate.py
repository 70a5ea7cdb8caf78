"""Lets requests in while the server can answer them, and counts those that are inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from paged_kv.integrations.server.http.api_errors import APIError


class Gate:
    """Open until `close`. All of this runs in one event loop.

    Attributes:
        inside: requests that are being answered.
    """

    def __init__(self) -> None:
        self.inside = 0
        self._refusal: APIError | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_open(self) -> bool:
        """Whether requests are let in."""
        return self._refusal is None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside.

        Raises:
            APIError: the one that the gate was closed with.
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
        """Let nobody in any more; the first refusal counts."""
        self._refusal = self._refusal or refusal

    async def wait_until_empty(self) -> None:
        """Wait until everybody has left."""
        await self._empty.wait()
