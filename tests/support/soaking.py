"""Clients of all kinds for a server in a process of its own, and the system's meters of it.

A third of the clients leave, stall, end their side of the connection or do not read. What the
others get is compared with a calm server's answers, and what all count with /metrics.
"""

import asyncio
import os
import random
import resource
import socket
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from tests.support.patience import PATIENCE_S, wait_until
from tests.support.server_process import metrics, server_process
from tests.support.soak_questions import (
    ENDLESS,
    Answer,
    Question,
    answer,
    asked,
    calm_answers,
    request,
    wrong_requests,
)

CLIENTS = 200
# The meters are read first after so many requests.
FIRST = 100
# Of the store, which overflows.
STORE_BYTES = 30_000_000
# The store has four threads that read, and begins each when the others are busy for the first time.
LATE_THREADS = 3

# stdlib-llama's template has no tools: some questions do all the same.
CALM = ["--dtype", "float32", "--prefill-step-size", "256", "--drop-tools"]
BUSY = [
    *CALM,
    *("--store-bytes", str(STORE_BYTES)),
    # Nobody is told to come again.
    *("--admission-timeout", "3600"),
    *("--header-timeout", "10", "--body-timeout", "10", "--write-timeout", "10"),
]
# 24 blocks of stdlib-llama, and drafts.
BUSY_LLAMA = [
    *BUSY,
    *("--max-kv-bytes", str(24 * 256 * 6 * 2 * 2 * 64 * 4)),
    *("--draft-model", "ngram", "--num-draft-tokens", "5"),
]


@dataclass
class Truth:
    """What the clients know.

    Attributes:
        behaviours: requests by what their client did.
        kinds: questions whose text was compared, by kind.
        wrong: texts that were not the calm server's, described.
        answered: requests by the status of the answer.
        finished: choices by finish reason. Clients that left ended theirs by "abort".
        prompt_tokens: of the prompts that began.
        completion_tokens: of the answers that were read.
        maybe_choices, maybe_prompt_tokens: of clients that left before the answer began: the server
            may not have seen their request.
    """

    behaviours: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    maybe_choices: int = 0
    maybe_prompt_tokens: int = 0

    def note(self, question: Question, expected: Answer, got: Answer) -> None:
        """Count an answer that was read to its end."""
        self.kinds[question.kind] += 1
        self.answered[str(got.status)] += 1
        self.finished.update(reason or "none" for _, reason in got.choices)
        self.prompt_tokens += got.prompt_tokens
        self.completion_tokens += got.completion_tokens
        if got != expected:
            self.wrong.append(f"{question.kind}: {got} instead of {expected}")

    def differences(self, counted: dict[str, float]) -> list[str]:
        """What /metrics says otherwise."""
        ranges = {f"http_requests_total.{status}": (n, n) for status, n in self.answered.items()}
        for reason, number in (Counter({"abort": 0}) + self.finished).items():
            most = number + (self.maybe_choices if reason == "abort" else 0)
            ranges[f"request_success_total.{reason}"] = (number, most)
        least = self.prompt_tokens
        ranges["prompt_tokens_total"] = (least, least + self.maybe_prompt_tokens)
        ranges["e2e_request_latency_seconds_count"] = (self.answered["200"],) * 2
        for idle in ("num_requests_refused_total", "num_requests_running", "num_requests_waiting"):
            ranges[idle] = (0, 0)
        told = {name for name in counted if name.startswith(("http_requests", "request_success"))}
        return [
            f"{name} is {counted.get(name, 0)}, and the clients count {least} to {most}"
            for name, (least, most) in {**dict.fromkeys(told, (0, 0)), **ranges}.items()
            if not least <= counted.get(name, 0) <= most
        ]


class Soak:
    """Requests of all kinds from many clients, with one random order for each seed.

    Args:
        port: of the server.
        asked_of: the questions, and `expected`, their answers.
        seed: of the order.
    """

    def __init__(
        self, port: int, asked_of: list[Question], expected: list[Answer], seed: int = 7
    ) -> None:
        self.truth = Truth()
        self._port = port
        self._known = list(zip(asked_of, expected, strict=True))
        self._texts = [each for each in self._known if each[0].kind != "images"]
        self._wrong = wrong_requests()
        self._rng = random.Random(seed)
        self._unread: list[socket.socket] = []
        self._good: list[Behaviour] = [self._reads] * 9 + [self._asks_wrongly]
        self._bad: list[Behaviour] = [
            self._leaves,
            self._leaves_at_once,
            self._stalls_in_the_head,
            self._stalls_in_the_body,
            self._drips,
            self._ends_its_side,
            self._does_not_read,
        ]

    def run(self, requests: int) -> None:
        """Send so many requests; return when the server has nothing left to do, or counts wrongly
        for minutes."""
        asyncio.run(self._run(requests))
        with suppress(AssertionError):
            wait_until(lambda: not self.truth.differences(metrics(self._port)))
        for client in self._unread:
            client.close()
        self._unread.clear()

    async def _run(self, requests: int) -> None:
        left = iter(range(requests))

        async def client(number: int) -> None:
            behaviours = self._good if number % 3 else self._bad
            for _ in left:
                act = self._rng.choice(behaviours)
                self.truth.behaviours[act.__name__.strip("_").replace("_", " ")] += 1
                await act()

        async with asyncio.TaskGroup() as group:
            for number in range(min(CLIENTS, requests)):
                group.create_task(client(number))

    async def _reads(self, **how: Any) -> None:
        question, expected = self._rng.choice(self._known)
        salt = {"cache_salt": self._rng.choice("abc")} if self._rng.random() < 0.5 else {}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        more = stream if self._rng.random() < 0.5 else {}
        got = await answer(self._port, asked(question, **salt, **more), **how)
        self.truth.note(question, expected, got)

    async def _drips(self) -> None:
        await self._reads(parts=20)

    async def _ends_its_side(self) -> None:
        await self._reads(half_closes=True)

    async def _asks_wrongly(self) -> None:
        bad = self._rng.choice(self._wrong)
        got = await answer(self._port, request(bad.path, bad.content))
        self.truth.answered[str(got.status)] += 1
        if got.status != bad.status:
            self.truth.wrong.append(f"{bad.content[:99]!r}: {got.status}")

    async def _stalls_in_the_head(self) -> None:
        got = await answer(self._port, asked(self._known[0][0])[:40])
        if got.status != 408:
            self.truth.wrong.append(f"half a head: {got.status}")

    async def _stalls_in_the_body(self) -> None:
        got = await answer(self._port, asked(self._known[0][0])[:-5])
        self.truth.answered[str(got.status)] += 1
        if got.status != 408:
            self.truth.wrong.append(f"half a body: {got.status}")

    def _endless(self) -> tuple[bytes, int]:
        """A request without an end, and its prompt's tokens."""
        question, expected = self._rng.choice(
            [each for each in self._texts if each[0].kind == "long"]
        )
        return asked(question, **ENDLESS), expected.prompt_tokens

    async def _leaves(self) -> None:
        """Somewhere within the answer."""
        said, prompt_tokens = self._endless()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(said)
        assert len(await reader.readexactly(self._rng.choice((1, 300, 20_000))))
        self._note_begun(prompt_tokens)
        writer.transport.abort()

    async def _leaves_at_once(self) -> None:
        said, prompt_tokens = self._endless()
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(said)
        await writer.drain()
        writer.close()
        self.truth.maybe_choices += 1
        self.truth.maybe_prompt_tokens += prompt_tokens

    async def _does_not_read(self) -> None:
        """The socket stays open until the server has nothing to do."""
        said, prompt_tokens = self._endless()
        client = socket.socket()
        # Before it connects: later the system would take more at first.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        self._unread.append(client)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", self._port))
        await loop.sock_sendall(client, said)
        self._note_begun(prompt_tokens)

    def _note_begun(self, prompt_tokens: int) -> None:
        self.truth.finished["abort"] += 1
        self.truth.prompt_tokens += prompt_tokens


Behaviour = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Soaked:
    """What a soak found.

    Attributes:
        truth: what the clients know.
        first, last: the system's meters of the idle server after the first requests, and at the
            end.
        counted: /metrics at the end.
        stored_bytes: the files of the store at the end.
        seconds: of all requests.
        status: with which the process ended.
        log: what it wrote.
    """

    truth: Truth
    first: dict[str, int]
    last: dict[str, int]
    counted: dict[str, float]
    stored_bytes: int
    seconds: float
    status: int
    log: list[str]


def soaked(
    calm: list[str], busy: list[str], store: Path, requests: int, asked_of: list[Question]
) -> Soaked:
    """Ask a calm server for the answers, and soak a busy one that has this store. Each is a process
    with these options."""
    with server_process(*calm) as (process, port), read_log(process):
        expected = asyncio.run(calm_answers(port, asked_of))
    with (
        server_process(*busy, "--store", str(store), "--store-after", "1") as (process, port),
        read_log(process) as log,
    ):
        began, soak = monotonic(), Soak(port, asked_of, expected)
        soak.run(min(FIRST, requests))
        first = meters(process.pid)
        soak.run(requests - FIRST)
        seconds = monotonic() - began
        # The event loop's thread pool lets idle threads go when it is used again.
        most = first["threads"] + LATE_THREADS
        with suppress(AssertionError):
            wait_until(lambda: metrics(port) and meters(process.pid)["threads"] <= most)
        last, counted = meters(process.pid), metrics(port)
        process.terminate()
        status = process.wait(PATIENCE_S)
    stored = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    return Soaked(soak.truth, first, last, counted, stored, seconds, status, log)


def meters(pid: int) -> dict[str, int]:
    """What Linux says of a process: resident bytes, open files and threads."""
    proc = Path(f"/proc/{pid}")
    resident = int((proc / "statm").read_text().split()[1]) * resource.getpagesize()
    return {
        "resident_bytes": resident,
        "files": len(os.listdir(proc / "fd")),
        "threads": len(os.listdir(proc / "task")),
    }


@contextmanager
def read_log(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """Read what a process logs, for which it would wait otherwise; whole when the block ends, which
    ends the process."""
    lines: list[str] = []
    error = process.stderr
    assert error is not None
    reader = Thread(target=lambda: lines.extend(error))
    reader.start()
    try:
        yield lines
    finally:
        process.kill()
        reader.join()
