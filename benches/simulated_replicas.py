"""Simulated replicas: routers of Ray Serve choose among them, on a simulated clock.

A `SimulatedReplica` has no model. It prefills prompts one after the other, `PREFILL` tokens a
second, and then decodes each answer, `DECODE` tokens a second, however many it decodes at once. Its
cache has blocks of 512 tokens: of a prompt it finds the first ones that are there, and evicts those
that were used least recently. The routers are the real ones, driven as Ray Serve drives them, in
this process and without a cluster.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from paged_kv.server.replicas.placement import (
    ForwardedRequest,
    Progress,
    Trail,
    trail_of,
)
from paged_kv.trace import MOONCAKE_BLOCK, TracedRequest, read_trace

BLOCK = MOONCAKE_BLOCK
TOKEN_BYTES = 4

# Tokens a second of a replica.
PREFILL, DECODE = 4_000, 30

# Of made-up agents: all share their tools and instructions, and a turn adds a block.
SHARED_BLOCKS, MOST_TURNS = 40, 20
ANSWER, TURN_S, SESSIONS_A_SECOND = 100, 20.0, 0.65

# More than these loads reach: no replica refuses one.
MOST_ONGOING = 1_000

DEPLOYMENT = DeploymentID(name="Replica")


@dataclass(frozen=True)
class SimulatedRequest:
    """A request of a trace, and what a router sees of it.

    Attributes:
        arrives: in seconds.
        blocks: the ids of its prompt's blocks.
        prompt, answer: tokens.
        trail: of its prompt.
    """

    arrives: float
    blocks: Sequence[int]
    prompt: int
    answer: int
    trail: Trail


@dataclass(frozen=True)
class SimulatedAnswer:
    """What a request got.

    Attributes:
        replica: its number.
        found: tokens of the prompt that the replica did not compute.
        waited: seconds until the first token.
        ends: when the answer is whole, in seconds.
    """

    replica: int
    found: int
    waited: float
    ends: float


class BlockCache:
    """The blocks that a replica keeps; the least recently used are evicted, and of a prompt the
    last ones first.

    Args:
        most: how many fit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def find(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks are kept. Afterwards all are, or as many as fit."""
        found = next(
            (at for at, each in enumerate(blocks) if each not in self._blocks), len(blocks)
        )
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return found


def found_tokens(cache: BlockCache, request: SimulatedRequest) -> int:
    """The tokens of a prompt that a cache has. The last one is computed always."""
    return min(cache.find(request.blocks) * BLOCK, request.prompt - 1)


class SimulatedReplica(RunningReplica):  # type: ignore[misc]  # Ray's types are not all there
    """A replica as a router sees it, and what it would have done.

    Args:
        number: names it.
        blocks: how many its cache holds.

    Attributes:
        ongoing: how many requests it has.
    """

    max_ongoing_requests = MOST_ONGOING
    node_id, availability_zone = "", None
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(self, number: int, blocks: int) -> None:
        self.number = number
        self.ongoing = 0
        self._id = ReplicaID(str(number), DEPLOYMENT)
        self._cache = BlockCache(blocks)
        self._free = 0.0

    @property
    def replica_id(self) -> ReplicaID:
        """See `RunningReplica`."""
        return self._id

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """See `RunningReplica`."""
        return self.ongoing

    def answer(self, request: SimulatedRequest) -> SimulatedAnswer:
        """Take a request. Prompts are prefilled in the order of arrival, so it is known at once how
        that will go."""
        found = found_tokens(self._cache, request)
        begins = max(self._free, request.arrives)
        self._free = begins + (request.prompt - found) / PREFILL
        self.ongoing += 1
        ends = self._free + request.answer / DECODE
        return SimulatedAnswer(self.number, found, self._free - request.arrives, ends)


class SimulatedServe:
    """Drives a router as Ray Serve does, on a simulated clock.

    Args:
        router: its class.
        replicas: those that it chooses among.
    """

    def __init__(self, router: type[RequestRouter], replicas: Sequence[SimulatedReplica]) -> None:
        self._now = 0.0
        # With their moments and names, the first at the front.
        self._first_tokens: list[tuple[float, str, Progress]] = []
        self._ends: list[tuple[float, str, Progress, SimulatedReplica]] = []
        # As Ray Serve makes it, in a running event loop.
        self._router: Any = router(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            get_curr_time_s=lambda: self._now,
        )
        self._router.initialize_state()
        self._router.update_replicas(replicas)

    async def answers(self, requests: Sequence[SimulatedRequest]) -> list[SimulatedAnswer]:
        """What each request gets."""
        return [await self._answer(str(n), request) for n, request in enumerate(requests)]

    async def _answer(self, name: str, request: SimulatedRequest) -> SimulatedAnswer:
        self._now = request.arrives
        self._go_on()
        forwarded = ForwardedRequest({}, b"", request.trail)
        pending = PendingRequest(args=[forwarded], kwargs={}, metadata=RequestMetadata(name, name))
        replica: SimulatedReplica = await self._router._choose_replica_for_request(pending)
        answer = replica.answer(request)
        self._router.on_send_request(replica.replica_id)
        self._router.on_new_queue_len_info(replica.replica_id, replica.ongoing)
        self._router.on_request_routed(pending, replica.replica_id, None)
        progress = forwarded.progress
        heappush(self._first_tokens, (request.arrives + answer.waited, name, progress))
        heappush(self._ends, (answer.ends, name, progress, replica))
        return answer

    def _go_on(self) -> None:
        """Begin and end the answers whose time has come, as the front and Ray Serve tell it."""
        while self._first_tokens and self._first_tokens[0][0] <= self._now:
            heappop(self._first_tokens)[2].has_begun = True
        while self._ends and self._ends[0][0] <= self._now:
            _, name, progress, replica = heappop(self._ends)
            progress.has_ended = True
            replica.ongoing -= 1
            self._router.on_request_completed(replica.replica_id, name)
            self._router.decrement_queue_len_cache(replica.replica_id)


def simulated_answers(
    router: type[RequestRouter], requests: Sequence[SimulatedRequest], replicas: int, blocks: int
) -> list[SimulatedAnswer]:
    """What requests get of so many replicas, whose caches have so many blocks in all."""

    async def answers() -> list[SimulatedAnswer]:
        random.seed("replicas")  # of which Serve's own router draws
        chosen_among = [SimulatedReplica(each, blocks // replicas) for each in range(replicas)]
        return await SimulatedServe(router, chosen_among).answers(requests)

    return asyncio.run(answers())


def conversations(file: Path) -> list[SimulatedRequest]:
    """The requests of a trace in Mooncake's format. Its clock has steps of 3 seconds: those of one
    step arrive spread over it.

    Raises:
        ValueError, OSError: the file has another format, or cannot be read.
    """
    requests = read_trace(file).requests
    return [
        simulated_request(arrives, each.block_ids, each.prompt_length, each.answer_length)
        for arrives, each in zip(_arrivals(requests), requests, strict=True)
    ]


def agents(count: int) -> list[SimulatedRequest]:
    """So many requests of made-up agents, which come and go: sessions of 1 to `MOST_TURNS` turns,
    whose prompts all begin with the same `SHARED_BLOCKS` blocks."""
    draw, now, first = random.Random("agents"), 0.0, SHARED_BLOCKS
    requests: list[SimulatedRequest] = []
    while len(requests) < count:
        now += draw.expovariate(SESSIONS_A_SECOND)
        arrives, turns = now, draw.randint(1, MOST_TURNS)
        for turn in range(1, turns + 1):
            blocks = [*range(SHARED_BLOCKS), *range(first, first + turn)]
            requests.append(simulated_request(arrives, blocks, len(blocks) * BLOCK, ANSWER))
            arrives += draw.expovariate(1 / TURN_S)
        first += turns
    return sorted(requests, key=lambda each: each.arrives)


def simulated_request(
    arrives: float, blocks: Sequence[int], prompt: int, answer: int
) -> SimulatedRequest:
    """A request whose prompt is made up: a token has four bytes, and a block those that its id
    decides."""
    text = b"".join(map(text_of_block, blocks))[: prompt * TOKEN_BYTES]
    return SimulatedRequest(arrives, blocks, prompt, answer, trail_of([b"", text]))


def text_of_block(block: int) -> bytes:
    """2,048 bytes."""
    return sha256(b"%d" % block).hexdigest().encode() * (BLOCK * TOKEN_BYTES // 64)


def _arrivals(requests: Sequence[TracedRequest]) -> list[float]:
    """When requests arrive, in seconds: those of one moment spread until the next one."""
    counts = Counter(each.arrives for each in requests)
    return [
        (moment + (after - moment) * number / counts[moment]) / 1e3
        for moment, after in pairwise([*counts, max(counts)])
        for number in range(counts[moment])
    ]
