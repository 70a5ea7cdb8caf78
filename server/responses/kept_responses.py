"""Keeps responses for their owners, who continue, read and forget them."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_kv.lru import LRU
from paged_kv.server.completions.interface import Object
from paged_kv.server.http.access import Clients, salt_of
from paged_kv.server.http.api_errors import APIError, shortened, wrong_value
from paged_kv.server.options import ServerOptions
from paged_kv.server.responses.answers import ID_PREFIXES


@dataclass(eq=False)
class Turn:
    """One response and the items of the input, each with an id, that it answers, behind those of
    the turn that it continues. Both have `nbytes` as JSON, and are kept since a time of the store's
    clock."""

    previous: Turn | None
    inputs: list[Any]
    body: dict[str, Any]
    nbytes: int
    since: float = field(default=0.0)

    @property
    def items(self) -> list[Any]:
        return [*self.inputs, *self.body["output"]]

    def turns(self) -> list[Turn]:
        """This turn behind all before it."""
        turns = [self]
        while (previous := turns[-1].previous) is not None:
            turns.append(previous)
        return turns[::-1]

    def all_items(self) -> list[Any]:
        """The items of this turn and of all before it."""
        return [item for turn in self.turns() for item in turn.items]

    def all_inputs(self) -> list[Any]:
        """The items that the model was given for this response."""
        return [*(self.previous.all_items() if self.previous else ()), *self.inputs]


class KeptResponses:
    """The latest responses, each for its owner. Any thread may use it.

    Beyond a limit the least recently used one goes. A turn that a later one continues is no longer
    found, but its bytes count until the later one has gone too.

    Args:
        options: `max_responses`, `max_response_bytes`, `response_ttl` in seconds.
        clock: tells the time in seconds.
        place: names the server among several that share an address; ids begin with it.
    """

    def __init__(
        self, options: ServerOptions, clock: Callable[[], float] = monotonic, place: str = ""
    ) -> None:
        self._most_bytes: int = options.max_response_bytes
        self._ttl_s: float = options.response_ttl
        self._clock = clock
        self._place = place
        self._turns: LRU[tuple[Hashable, str], Turn] = LRU(options.max_responses)
        # A turn may be freed, and counted off, while its own thread keeps another.
        self._lock = RLock()
        self.nbytes = 0

    def new_name(self) -> str:
        """A part of the ids of a new response and of its items."""
        return f"{self._place}{uuid.uuid4().hex}"

    def keep(self, owner: Hashable, turn: Turn) -> None:
        """Keep a turn under the id of its response, unless it alone is over a limit."""
        if turn.nbytes > self._most_bytes or not self._turns.most:
            return
        with self._lock:
            turn.since = self._clock()
            self.nbytes += turn.nbytes
            weakref.finalize(turn, self._forget, turn.nbytes)
            self._turns[owner, turn.body["id"]] = turn
            while self._turns and self._is_over():
                self._turns.popitem()

    def get(self, owner: Hashable, response_id: str) -> Turn:
        """A kept turn. Raises APIError 404: there is none of this owner, or no longer."""
        with self._lock:
            turn = self._turns.use((owner, response_id))
            if turn is not None and self._is_old(turn):
                del self._turns[owner, response_id]
                turn = None
            if turn is None:
                raise _not_found("response", response_id)
            return turn

    def items(self, owner: Hashable, ids: Iterable[str]) -> dict[str, Any]:
        """Items of kept turns by their ids; several turns may have been given the same. Raises
        APIError 404: there is one of none of this owner's turns, or no longer."""
        missing, found = set(ids), dict[str, Any]()
        with self._lock:
            for key in reversed([*self._turns]):
                if not missing:
                    break
                turn = self._turns[key]
                if key[0] == owner and not self._is_old(turn):
                    given = {item["id"]: item for item in turn.items if item["id"] in missing}
                    found |= given
                    missing -= given.keys()
                    if given:
                        self._turns.use(key)
        if missing:
            raise _not_found("item", min(missing))
        return found

    def delete(self, owner: Hashable, response_id: str) -> None:
        """Forget a turn. Raises APIError 404: as `get`."""
        with self._lock:
            self.get(owner, response_id)
            del self._turns[owner, response_id]

    def _is_over(self) -> bool:
        oldest = next(iter(self._turns.values()))
        return self._is_old(oldest) or self.nbytes > self._most_bytes

    def _is_old(self, turn: Turn) -> bool:
        return self._clock() - turn.since > self._ttl_s

    def _forget(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes -= nbytes


def _not_found(kind: str, name: str) -> APIError:
    return APIError(
        404,
        f"there is no {kind} {shortened(name)}: it was never kept, or has been forgotten",
        code=f"{kind}_not_found",
    )


# As at OpenAI.
_USUAL_LIMIT = 20
_MOST_LISTED = 100


def named(items: Iterable[Object], name: str) -> list[Object]:
    """The items, each with a type and an id, in which the name is."""
    found = []
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        item_id = item.get("id") or f"{ID_PREFIXES[kind]}_{name}_{number}"
        found.append({**item, "type": kind, "id": item_id})
    return found


def _in_parts(item: Object) -> Object:
    content = item.get("content")
    if not isinstance(content, str):
        return item
    part: Object = {"type": "input_text", "text": content}
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": content, "annotations": []}
    return {**item, "content": [part]}


def page_of(items: Sequence[Object], query: Mapping[str, str]) -> Object:
    """A page of a list, the earliest items first. In the query `order` is asc or desc, `limit` from
    1 to 100, and `after` the id of an item. Raises APIError 400: the query is wrong."""
    order, limit = query.get("order", "desc"), query.get("limit", str(_USUAL_LIMIT))
    if order not in ("asc", "desc"):
        raise wrong_value(f"order: asc or desc is possible, got {shortened(order)}", "order")
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MOST_LISTED):
        message = f"limit: a number from 1 to {_MOST_LISTED} is needed, got {shortened(limit)}"
        raise wrong_value(message, "limit")
    items = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise wrong_value(f"after: there is no item {shortened(after)} here", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return {"object": "list", "data": page, "has_more": len(items) > len(page), **ends}


class ResponseReader:
    """Answers requests for kept responses."""

    def __init__(self, clients: Clients, kept: KeptResponses) -> None:
        self._clients = clients
        self._kept = kept

    async def answer(self, request: Request) -> Response:
        """Send a response, or forget it."""
        owner, name = self._requested(request)
        if request.method == "DELETE":
            self._kept.delete(owner, name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise wrong_value(
                "stream: only responses in the background are streamed again", "stream"
            )
        return JSONResponse(self._kept.get(owner, name).body)

    async def inputs(self, request: Request) -> Response:
        """Send what the model was given for a response, the latest items first."""
        owner, name = self._requested(request)
        inputs = self._kept.get(owner, name).all_inputs()
        items = [{"status": "completed", **_in_parts(item)} for item in inputs]
        return JSONResponse(page_of(items, request.query_params))

    async def cancel(self, request: Request) -> Response:
        """Refuse to stop a response, as none is in the background: a client stops its own request
        by leaving. Raises APIError 400, or 404 if the response is not kept."""
        self._kept.get(*self._requested(request))
        raise wrong_value(
            "only a response in the background is cancelled; this one has ended", "id"
        )

    def _requested(self, request: Request) -> tuple[Hashable, str]:
        """The owner that a client stands for, and the id of the response."""
        owner = salt_of(self._clients.require(request), request.query_params.get("cache_salt"))
        return owner, request.path_params["name"]
