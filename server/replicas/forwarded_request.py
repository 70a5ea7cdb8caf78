"""A request as it goes from the front to a replica, and what the router knows of its prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from starlette.types import Scope
from xxhash import xxh3_64

from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.request_body import parsed_json

# What of a request decides its prompt, in the order in which most chat templates use it.
_BEFORE = ("cache_salt", "model", "adapters", "tools", "system", "instructions")
_TURNS = ("messages", "input", "prompt")

# The parts of a scope that a request needs; others belong to the process that received it.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)

# The ids that a server in a place gives to responses and their items: see `KeptResponses.new_name`.
_PLACED_ID = re.compile(r"[a-z]+_(?P<place>\w+)[0-9a-f]{32}(_\d+)?", re.ASCII)

LEAST_CUT = 256
CUT_SHARE = 16


@dataclass(frozen=True)
class Trail:
    """The beginnings of a prompt, by which replicas that know them are found.

    Attributes:
        digests: of the beginnings that end at `cuts`, the shortest first.
        length: of the whole prompt in bytes of JSON, of which a token takes about four.
    """

    digests: tuple[int, ...] = ()
    length: int = 0


@dataclass(eq=False)
class Progress:
    """How far an answer has come. The front notes it, and the router, which is in the same process,
    looks at it: Ray Serve tells the router of an end when the client may ask again already."""

    has_begun: bool = False
    has_ended: bool = False


@dataclass(frozen=True)
class ForwardedRequest:
    """A request of HTTP.

    Attributes:
        scope: of ASGI.
        body: the whole body.
        trail: of its prompt.
        place: the replica that alone can answer it, as it keeps the response that is asked for;
            empty for any.
        avoided: replicas that have refused it.
        progress: of its answer.
    """

    scope: Scope
    body: bytes
    trail: Trail = Trail()
    place: str = ""
    avoided: frozenset[str] = frozenset()
    progress: Progress = field(default_factory=Progress, compare=False)


def forwarded_request(scope: Scope, body: bytes) -> ForwardedRequest:
    """The request of a scope and its body, which is decoded. Takes a millisecond for each megabyte
    or so."""
    headers = dict(scope["headers"])
    fields = _fields(body) if scope["method"] == "POST" else {}
    sent = [each for each in scope["headers"] if each[0] != b"content-encoding"]
    return ForwardedRequest(
        {name: scope[name] for name in _SCOPE if name in scope} | {"headers": sent},
        body,
        trail_of([headers.get(b"authorization", b""), *_prompt(fields)]),
        next(filter(None, map(_place, _named_ids(scope["path"], fields))), ""),
    )


def trail_of(parts: Iterable[bytes]) -> Trail:
    """The trail of a prompt in parts: the first decides who shares it, the others follow each
    other."""
    first, *others = parts
    text = b"".join(others)
    digest, digests, begin = xxh3_64(first), [], 0
    for end in takewhile(lambda end: end <= len(text), cuts()):
        digest.update(text[begin:end])
        digests.append(digest.intdigest())
        begin = end
    return Trail(tuple(digests), len(text))


def cuts() -> Iterator[int]:
    """The lengths of the beginnings that are remembered: about 120 of a million bytes, each at most
    a sixteenth longer than the one before."""
    end = 0
    while True:
        end += max(LEAST_CUT, end // CUT_SHARE)
        yield end


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a body; none if a replica will refuse it."""
    try:
        return parsed_json(body)
    except APIError:
        return {}


def _prompt(fields: Mapping[str, Any]) -> Iterator[bytes]:
    for name in _BEFORE:
        yield json.dumps(fields.get(name), ensure_ascii=False).encode()
    for name in _TURNS:
        turns = fields.get(name, ())
        # A text or a list of tokens goes on as a longer one: without quotes or brackets.
        for turn in turns if isinstance(turns, list) else [turns]:
            yield (turn if isinstance(turn, str) else json.dumps(turn, ensure_ascii=False)).encode()
            yield b","


def _named_ids(path: str, fields: Mapping[str, Any]) -> Iterator[Any]:
    """The ids of kept responses and items that a request names."""
    yield from path.split("/")
    yield fields.get("previous_response_id")
    items = fields.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and "role" not in item:
            yield item.get("id")


def _place(name: Any) -> str:
    match = _PLACED_ID.fullmatch(name) if isinstance(name, str) else None
    return match["place"] if match else ""
