"""Ends the work for a client that has disconnected or stopped reading."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run work for a client whose request was received completely.

    Raises:
        ClientDisconnect: the client has left, and the work was cancelled.
    """
    left = asyncio.ensure_future(_disconnected(receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({left, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        left.cancel()
        working.cancel()
        await asyncio.gather(left, working, return_exceptions=True)


def within(send: Send, timeout_s: float) -> Send:
    """A `send` that raises ClientDisconnect if the client takes longer to read a part."""

    async def timed(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError:
            # The client is connected but does not read.
            raise ClientDisconnect from None

    return timed


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
