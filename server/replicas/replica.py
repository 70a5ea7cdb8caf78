"""One server of several, which gets its requests from the front: a replica, the processes that
share its model, and what sees to it that all replicas compute the same."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message

from paged_kv.integrations.distributed.connected_ranks import joined_ranks
from paged_kv.integrations.mlx_lm_internals import downloaded
from paged_kv.server.app import make_app
from paged_kv.server.completions.service import Service
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.http.api_errors import busy
from paged_kv.server.lifecycle import follow, require_loaded
from paged_kv.server.options import ServerOptions
from paged_kv.server.replicas.placement import ForwardedRequest
from paged_kv.server.server_command import prepare_process

log = logging.getLogger(__name__)

# Of each file, so many pieces, spread over it. Other weights differ nearly everywhere, and a large
# model takes minutes to read.
PIECES, PIECE_BYTES = 64, 4096


class WholeAnswer(NamedTuple):
    """What one replica answers to a request that goes to all."""

    place: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replica:
    """A server without a socket, made by Ray Serve with a handle of `Agreement`.

    Raises:
        ValueError, OSError: the model cannot be loaded, or the replica differs from others.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: ServerOptions, agreement: DeploymentHandle
    ) -> None:
        prepare_process(options)
        self.place: str = serve.get_replica_context().replica_id.unique_id
        # A replica keeps its other ranks: Ray ends actors that nobody can call.
        self._ranks = await start_ranks(options)
        provider = PagedModelProvider(options)
        self._service = Service(options, provider, self.place)
        self._app = make_app(self._service)
        thread = self._service.thread
        thread.start()
        try:
            await run_in_threadpool(require_loaded, thread, provider)
            folder = None if options.model is None else downloaded(options.model)
            identity = await run_in_threadpool(identity_of, folder)
            await agreement.require_same.remote(self.place, identity)
        except BaseException:
            provider.ranks.abandon()
            self._end()
            raise

    def check_health(self) -> None:
        """If this raises, Ray Serve starts another replica in the place of this one."""
        if not self._service.is_healthy:
            raise RuntimeError("the generation thread has died, or its step hangs")

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[str | list[Message]]:
        """Yields the name of this replica, and then messages of ASGI. If the caller cancels, the
        request ends as if its client had left."""
        yield self.place
        async for messages in _answered(self._app, request):
            yield messages

    async def answer_whole(self, request: ForwardedRequest) -> WholeAnswer:
        """The same, of a request whose answers are put together."""
        messages = [each async for some in _answered(self._app, request) for each in some]
        body = b"".join(each.get("body", b"") for each in messages)
        return WholeAnswer(self.place, messages[0]["status"], messages[0]["headers"], body)

    async def __del__(self) -> None:
        """Store cached prefixes and end. Ray Serve calls this when the requests have ended, or
        their time has."""
        if hasattr(self, "_service"):
            refusal = busy("the replica is shutting down: ask again")
            self._service.gate.close(refusal)
            self._service.thread.refuse(refusal)
            await run_in_threadpool(self._end)

    def _end(self) -> None:
        self._service.thread.stop()
        self._service.thread.join()
        self._service.workers.close()


async def _answered(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
    """Yields the messages that an application sends, as many at once as there are. An application
    whose messages nobody takes any more is told that its client has left."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    received: asyncio.Queue[Message] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": request.body, "more_body": False})

    async def run() -> None:
        try:
            await app(dict(request.scope), received.get, sent.put)
        except Exception:
            # Its client has got an answer, or a part of one.
            log.exception("the application has failed")
        finally:
            sent.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        message = await sent.get()
        while message is not None:
            messages = [message]
            while not sent.empty() and (message := sent.get_nowait()) is not None:
                messages.append(message)
            yield messages
            if message is not None:
                message = await sent.get()
    finally:
        received.put_nowait({"type": "http.disconnect"})
        await running


class Agreement:
    """Knows what the first replica computes with. Ray Serve runs one beside the replicas."""

    _first: tuple[str, dict[str, str]] | None = None

    def require_same(self, place: str, identity: dict[str, str]) -> None:
        """Raise ValueError if the identity of the replica in a place is not that of the first."""
        if self._first is None:
            self._first = place, identity
        first, expected = self._first
        for name, value in identity.items():
            if value != expected[name]:
                raise ValueError(
                    f"replica {place} has {name} {value}, and replica {first}, with which it is to "
                    f"answer as one, has {expected[name]}: install the same on all machines, and "
                    "give them the same files"
                )


def identity_of(folder: Path | None) -> dict[str, str]:
    """What decides the answers of a replica, beside its options: versions, and the files in the
    model's folder; None if requests name a model."""
    named = {package: version(package) for package in ("paged-kv", "mlx", "mlx-lm")}
    return named if folder is None else named | {"model": _digest(folder)}


def _digest(folder: Path) -> str:
    """A hash of the names, sizes and pieces of a model's files."""
    digest = sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as content:
                for number in range(PIECES):
                    content.seek(number * max(0, size - PIECE_BYTES) // (PIECES - 1))
                    digest.update(content.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


class Rank:
    """Another rank than the first: an actor of Ray. It ends with the first."""

    def address(self) -> str:
        return free_address()

    def follow(self, rank: int, addresses: list[str], options: ServerOptions) -> int:
        """Compute what rank 0 decides, until it ends; returns the exit status."""
        prepare_process(options)
        _join(rank, addresses)
        return follow(PagedModelProvider(options))


async def start_ranks(options: ServerOptions) -> list[Any]:
    """Start the other ranks of this replica, one in each other bundle of its placement group, and
    make this process rank 0. Returns their actors; none if the replica is alone."""
    group = get_current_placement_group()
    if group is None:
        return []
    actors = [
        ray.remote(Rank)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        )
        .remote()
        for number, bundle in enumerate(group.bundle_specs)
        if number
    ]
    others = await asyncio.gather(*[actor.address.remote() for actor in actors])
    addresses = [free_address(), *others]
    for rank, actor in enumerate(actors, start=1):
        actor.follow.remote(rank, addresses, options)
    _join(0, addresses)
    return actors


def free_address() -> str:
    """The address of this machine in the cluster, and a port that is free there."""
    host = get_node_ip_address()
    with socket.create_server((host, 0)) as listening:
        return f"{host}:{listening.getsockname()[1]}"


def _join(rank: int, addresses: list[str]) -> None:
    """Meet the other ranks, told of them as mlx.launch tells processes for the backend ring."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as hosts:
        json.dump([[each] for each in addresses], hosts)
        hosts.flush()
        os.environ |= {"MLX_HOSTFILE": hosts.name, "MLX_RANK": str(rank)}
        joined_ranks()
