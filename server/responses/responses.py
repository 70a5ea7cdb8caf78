"""OpenAI's Responses, on the same models and caches as its completions."""

from __future__ import annotations

import json
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from time import monotonic
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_kv.server.completions.interface import Answers, Interface, ReadRequest
from paged_kv.server.completions.prompt_logprobs import Logprobs
from paged_kv.server.http.access import APIKeys, salt_of
from paged_kv.server.http.api_errors import APIError, shortened, wrong_value
from paged_kv.server.http.known_fields import require_known
from paged_kv.server.http.request_body import checked, parsed_json
from paged_kv.server.http.schema import ChatBody
from paged_kv.server.options import ServerOptions
from paged_kv.server.responses.answers import ID_PREFIXES, ResponseAnswers
from paged_kv.server.responses.requests import (
    ENCRYPTED,
    ONLY,
    SHARED,
    WITHOUT_MEANING,
    ResponsesBody,
)
from paged_kv.server.responses.tools import OfferedTool, offered_tools
from paged_kv.server.responses.translation import chat_of


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
        place: names the server among several that share an address; ids begin with it.
    """

    def __init__(
        self,
        options: ServerOptions,
        clock: Callable[[], float] = monotonic,
        place: str = "",
    ) -> None:
        self._most: int = options.max_responses
        self._most_bytes: int = options.max_response_bytes
        self._ttl_s: float = options.response_ttl
        self._clock = clock
        self._place = place
        self._turns: OrderedDict[tuple[Hashable, str], Turn] = OrderedDict()
        # The turns that items came with, or were given for.
        self._turn_of: WeakValueDictionary[tuple[Hashable, str], Turn] = WeakValueDictionary()
        # A turn may be freed, and counted off, while its own thread keeps another.
        self._lock = RLock()
        self.nbytes = 0

    def new_name(self) -> str:
        """A part of the ids of a new response and of its items."""
        return f"{self._place}{uuid.uuid4().hex}"

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


Object = dict[str, Any]

# As at OpenAI.
_USUAL_LIMIT = 20
_MOST_LISTED = 100


def named(items: Iterable[Object], name: str) -> list[Object]:
    """The items, each with a type and an id, in which the name is."""
    return [_named(item, f"{name}_{number}") for number, item in enumerate(items)]


def _named(item: Object, name: str) -> Object:
    kind = item.get("type") or "message"
    item_id = item.get("id") or f"{ID_PREFIXES[kind]}_{name}"
    return {**item, "type": kind, "id": item_id}


def listed_inputs(items: Iterable[Object]) -> list[Object]:
    """Named items in the form of OpenAI's lists."""
    return [{"status": "completed", **_in_parts(item)} for item in items]


def _in_parts(item: Object) -> Object:
    content = item.get("content")
    if not isinstance(content, str):
        return item
    part: Object = {"type": "input_text", "text": content}
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": content, "annotations": []}
    return {**item, "content": [part]}


def page_of(items: Sequence[Object], query: Mapping[str, str]) -> Object:
    """A page of a list.

    Args:
        items: of the whole list, the earliest first.
        query: `order` is "asc" or "desc", `limit` from 1 to 100, and `after` the id of an item.

    Raises:
        APIError: 400, the query is wrong.
    """
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


PATH = "/v1/responses"


class Responses(Interface):
    """Responses.

    Args:
        kept: those that can be continued.
    """

    fields: ClassVar = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
    }

    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept

    def read(self, content: bytes, key: str | None) -> ReadRequest:
        """See `Interface`."""
        fields = parsed_json(content)
        known = (*ResponsesBody.model_fields, *SHARED)
        require_known(fields, known, without_meaning=WITHOUT_MEANING, only=ONLY)
        body = checked(fields, ResponsesBody)
        salt = fields.get("cache_salt")
        owner = salt_of(key, salt if isinstance(salt, str) else None)
        previous = self._previous(owner, body)
        earlier = [] if previous is None else previous.all_items()
        items = named(self._resolved(owner, body), self._kept.new_name())
        tools = offered_tools(body.tools or ())
        chat = self.chat_body(chat_of(fields, body, [*earlier, *items], tools.values()))
        keep = partial(self._keep, owner, previous, items, len(json.dumps(items)), chat.store)
        answers = partial(_answers, self._kept.new_name(), fields, body, chat, tools, keep)
        return ReadRequest(chat, answers, len(content))

    def _previous(self, owner: Hashable, body: ResponsesBody) -> Turn | None:
        """The turn that a request continues.

        Raises:
            APIError: 400, it is not kept.
        """
        if body.previous_response_id is None:
            return None
        try:
            return self._kept.get(owner, body.previous_response_id)
        except APIError as error:
            message = f"previous_response_id: {error.message}"
            raise wrong_value(message, "previous_response_id") from error

    def _resolved(self, owner: Hashable, body: ResponsesBody) -> list[Any]:
        """The items of the input, with those that references name in their places.

        Raises:
            APIError: 400, an item is not kept, or is named twice: prompts would have no limit.
        """
        seen: set[str] = set()
        items = []
        for item in body.items:
            if "role" not in item and item.get("type") in (None, "item_reference"):
                if item["id"] in seen:
                    raise wrong_value(f"input: item {shortened(item['id'])} comes twice", "input")
                seen.add(item["id"])
                try:
                    item = self._kept.item(owner, item["id"])
                except APIError as error:
                    raise wrong_value(f"input: {error.message}", "input") from error
            items.append(item)
        return items

    def _keep(
        self,
        owner: Hashable,
        previous: Turn | None,
        items: list[Any],
        nbytes: int,
        store: bool | None,
        response: dict[str, Any],
    ) -> None:
        if store is not False:
            nbytes += len(json.dumps(response))
            self._kept.keep(owner, Turn(previous, items, response, nbytes))


class ResponseReader:
    """Answers requests for kept responses.

    Args:
        keys: of the server.
        kept: the responses.
    """

    def __init__(self, keys: APIKeys, kept: KeptResponses) -> None:
        self._keys = keys
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
        items = listed_inputs(self._kept.get(owner, name).all_inputs())
        return JSONResponse(page_of(items, request.query_params))

    async def cancel(self, request: Request) -> Response:
        """Refuse to stop a response, as none is in the background: a client stops its own request
        by leaving.

        Raises:
            APIError: 400, or 404 if the response is not kept.
        """
        self._kept.get(*self._requested(request))
        raise wrong_value(
            "only a response in the background is cancelled; this one has ended", "id"
        )

    def _requested(self, request: Request) -> tuple[Hashable, str]:
        """The owner that a client stands for, and the id of the response."""
        owner = salt_of(self._keys.require(request), request.query_params.get("cache_salt"))
        return owner, request.path_params["name"]


def _answers(
    name: str,
    fields: dict[str, Any],
    body: ResponsesBody,
    chat: ChatBody,
    tools: Mapping[str, OfferedTool],
    keep: Any,
    _: str,
    tokenizer: Any,
) -> Answers:
    reasoning = body.reasoning
    repeated = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": chat.model,
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "store": fields.get("store") is not False,
        "temperature": fields.get("temperature"),
        "text": fields.get("text") or {"format": {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": fields.get("top_p"),
        "truncation": "disabled",
    }
    is_plain = ENCRYPTED in (body.include or ())
    return ResponseAnswers(
        name,
        repeated,
        tools,
        is_plain=is_plain,
        logprobs=Logprobs(tokenizer),
        keep=keep,
    )
