"""Names the items of inputs, and lists them for clients."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paged_kv.integrations.server.http.api_errors import shortened, wrong_value

Object = dict[str, Any]

# What ids of items begin with, as at OpenAI.
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
_REASONING = "rs"

# As at OpenAI.
_USUAL_LIMIT = 20
_MOST_LISTED = 100


def named(items: Iterable[Object]) -> list[Object]:
    """The items, each with an id and a type."""
    name = uuid.uuid4().hex
    return [_named(item, f"{name}_{number}") for number, item in enumerate(items)]


def _named(item: Object, name: str) -> Object:
    kind = item.get("type") or "message"
    item_id = item.get("id") or f"{_PREFIXES.get(kind, _REASONING)}_{name}"
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
