"""Lets Ray Serve send requests where their prefixes are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from paged_kv.server.replicas.forwarded_request import ForwardedRequest
from paged_kv.server.replicas.placement import MOST_BEGINNINGS, Placement


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not all there
    """Routes each `ForwardedRequest`, the first argument of a call; see `Placement`.

    It is made by Ray Serve, in the process of the front. With several fronts each has one, and
    learns where prefixes are from the requests that it routes itself.
    """

    # A busy replica is late to say how many requests it has. It is asked for its prefixes, and
    # another one would compute them.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, most_beginnings: int = MOST_BEGINNINGS) -> None:
        """See `RequestRouter`."""
        self._placement = Placement(most_beginnings)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`: one replica a rank, which is asked only if those before it are
        full."""
        assert pending_request is not None, "Serve routes requests"
        request: ForwardedRequest = pending_request.args[0]
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        able = _able(request, replicas)
        if not able:
            return []
        ranked = self._placement.ranked(request.trail, able)
        name = pending_request.metadata.internal_request_id
        self._placement.expect(name, request, ranked[0])
        pending_request.future.add_done_callback(partial(self._end_cancelled, name))
        return [[replicas[each]] for each in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """See `RequestRouter`."""
        request: ForwardedRequest = pending_request.args[0]
        name = pending_request.metadata.internal_request_id
        self._placement.begin(name, request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        self._placement.end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`."""
        super().update_replicas(replicas)
        self._placement.use([each.replica_id.unique_id for each in replicas])

    def _end_cancelled(self, name: str, chosen: asyncio.Future[Any]) -> None:
        if chosen.cancelled():
            self._placement.end(name)


def _able(request: ForwardedRequest, replicas: Iterable[str]) -> list[str]:
    """The replicas that may answer. Where that is none, any: its answer says what is missing."""
    names = list(replicas)
    if request.place in names:
        return [request.place]
    return [each for each in names if each not in request.avoided] or names
