"""Keeps responses in memory, so that clients can continue and read them."""

from __future__ import annotations

import argparse
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from threading import RLock
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

from paged_kv.integrations.server.http.api_errors import APIError, shortened


@dataclass(eq=False)
class Turn:
    """One response and what it answers.

    Attributes:
        previous: the turn that it continues.
        inputs: the items of the input, each with an id.
        body: the response object.
        nbytes: the length of both as JSON.
        since: the time at which it was kept, by the store's clock.
    """

    previous: Turn | None
    inputs: list[Any]
    body: dict[str, Any]
    nbytes: int
    since: float = field(default=0.0)

    @property
    def items(self) -> list[Any]:
        """The items of the input, and then of the output."""
        return [*self.inputs, *self.body["output"]]

    def all_items(self) -> list[Any]:
        """The items of this turn and of all before it."""
        turns = list(self._turns())
        return [item for turn in reversed(turns) for item in turn.items]

    def all_inputs(self) -> list[Any]:
        """The items that the model was given for this response."""
        return [*(self.previous.all_items() if self.previous else ()), *self.inputs]

    def _turns(self) -> Iterator[Turn]:
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous


class KeptResponses:
    """The latest responses, each for its owner. Any thread may use it.

    Beyond a limit the least recently used one goes. A turn that a later one continues is no longer
    found, but its bytes count until the later one has gone too.

    Args:
        options: `max_responses`, `max_response_bytes`, `response_ttl` in seconds.
        clock: tells the time in seconds.
    """

    def __init__(self, options: argparse.Namespace, clock: Callable[[], float] = monotonic) -> None:
        self._most: int = options.max_responses
        self._most_bytes: int = options.max_response_bytes
        self._ttl_s: float = options.response_ttl
        self._clock = clock
        self._turns: OrderedDict[tuple[Hashable, str], Turn] = OrderedDict()
        # The turns that items came with, or were given for.
        self._turn_of: WeakValueDictionary[tuple[Hashable, str], Turn] = WeakValueDictionary()
        # A turn may be freed, and counted off, while its own thread keeps another.
        self._lock = RLock()
        self.nbytes = 0

    def keep(self, owner: Hashable, turn: Turn) -> None:
        """Keep a turn under the id of its response, unless it alone is over a limit."""
        if turn.nbytes > self._most_bytes or not self._most:
            return
        with self._lock:
            turn.since = self._clock()
            self.nbytes += turn.nbytes
            weakref.finalize(turn, self._forget, turn.nbytes)
            self._turns[owner, turn.body["id"]] = turn
            for item in turn.items:
                self._turn_of[owner, item["id"]] = turn
            while self._turns and self._is_over():
                self._turns.popitem(last=False)

    def get(self, owner: Hashable, response_id: str) -> Turn:
        """A kept turn.

        Raises:
            APIError: 404, there is none of this owner, or no longer.
        """
        with self._lock:
            turn = self._turns.get((owner, response_id))
            if turn is not None and self._clock() - turn.since > self._ttl_s:
                del self._turns[owner, response_id]
                turn = None
            if turn is None:
                raise _not_found("response", response_id)
            self._turns.move_to_end((owner, response_id))
            return turn

    def item(self, owner: Hashable, item_id: str) -> Any:
        """An item of a kept turn.

        Raises:
            APIError: 404, there is none of this owner, or no longer.
        """
        with self._lock:
            turn = self._turn_of.get((owner, item_id))
            if turn is None:
                raise _not_found("item", item_id)
            self.get(owner, turn.body["id"])  # it may be forgotten, and only continued
            return next(item for item in turn.items if item["id"] == item_id)

    def delete(self, owner: Hashable, response_id: str) -> None:
        """Forget a turn.

        Raises:
            APIError: 404, as `get`.
        """
        self.get(owner, response_id)
        with self._lock:
            self._turns.pop((owner, response_id), None)

    def _is_over(self) -> bool:
        oldest = next(iter(self._turns.values()))
        is_old = self._clock() - oldest.since > self._ttl_s
        return is_old or len(self._turns) > self._most or self.nbytes > self._most_bytes

    def _forget(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes -= nbytes


def _not_found(kind: str, name: str) -> APIError:
    return APIError(
        404,
        f"there is no {kind} {shortened(name)}: it was never kept, or has been forgotten",
        code=f"{kind}_not_found",
    )
