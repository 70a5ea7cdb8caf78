"""Work for a client ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do some work for a client whose request was received whole.

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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
