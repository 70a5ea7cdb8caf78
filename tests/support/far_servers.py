"""A server far away: a port of loopback whose bytes come later."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread


@dataclass
class FarServer:
    """A port that leads to another port of this machine.

    Attributes:
        port: where it listens.
        round_trips: how often a client has sent something after it had got an answer, or first.
    """

    target: int
    one_way_s: float
    port: int = 0
    round_trips: int = 0

    def __post_init__(self) -> None:
        self.started, self._is_over = Event(), asyncio.Event()

    def close(self) -> None:
        """Serve no longer. Another thread calls it."""
        self._loop.call_soon_threadsafe(self._is_over.set)

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            self.started.set()
            await self._is_over.wait()

    async def _connected(self, here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        there, on = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.sleep(2 * self.one_way_s)  # what connecting takes
        last: list[str] = []
        await asyncio.gather(
            self._pass_on(here, on, "question", last), self._pass_on(there, back, "answer", last)
        )

    async def _pass_on(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, what: str, last: list[str]
    ) -> None:
        loop = asyncio.get_running_loop()
        coming: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        passing = asyncio.create_task(_later(coming, to))
        with suppress(OSError):
            while data := await source.read(1 << 20):
                if what == "question" and last != [what]:
                    self.round_trips += 1
                last[:] = [what]
                coming.put_nowait((loop.time() + self.one_way_s, data))
        coming.put_nowait((loop.time() + self.one_way_s, b""))
        await passing


async def _later(coming: "asyncio.Queue[tuple[float, bytes]]", to: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while True:
            at, data = await coming.get()
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            if not data:
                break
            to.write(data)
            await to.drain()
    to.close()


@contextmanager
def far_away(port: int, round_trip_s: float = 0.0) -> Iterator[FarServer]:
    """A server on this machine as it is seen from far away."""
    server = FarServer(port, round_trip_s / 2)
    thread = Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    server.started.wait()
    try:
        yield server
    finally:
        server.close()
        thread.join()
