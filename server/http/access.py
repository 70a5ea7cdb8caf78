"""Checks who may send requests: while the server takes any, by API keys with limits of their own,
and by the Host header of pages."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request

from paged_kv.options import PriorityRange, priorities
from paged_kv.server.http.api_errors import APIError, shortened, wrong_value

ENVIRONMENT = "env:"


def read_api_keys(source: str | None, option: str = "--api-key") -> list[str]:
    """The keys that an option names: the lines of a file, or of an environment variable. Raises
    ValueError: it holds no key; OSError: the file cannot be read."""
    if source is None:
        return []
    if source.startswith(ENVIRONMENT):
        text = os.environ.get(source.removeprefix(ENVIRONMENT), "")
    else:
        text = Path(source).read_text(encoding="utf-8")
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ValueError(
            f"{option} {source} holds no key: give a file with one a line, or env:NAME of a "
            "variable that is set"
        )
    return keys


def read_prefill_key(source: str | None) -> str | None:
    """The one key that `--prefill-key` names, or None. Raises as `read_api_keys`."""
    keys = read_api_keys(source, "--prefill-key")
    if len(keys) > 1:
        raise ValueError(
            f"--prefill-key {source} holds {len(keys)} keys: give the one to send to the other "
            "server"
        )
    return keys[0] if keys else None


class Limits(NamedTuple):
    """What a client may do: the priorities of its requests, and how many may run or wait at the
    same time; None for any number."""

    priorities: PriorityRange
    requests: int | None = None


def read_limits(lines: Iterable[str], default: Limits) -> dict[str, Limits]:
    """The limits of each key. A line has a key, and what differs from the default: `KEY requests=8
    priorities=-10:100`. Raises ValueError: a line says something else."""
    found = {}
    for line in lines:
        key, *settings = line.split()
        limits = default
        for each in settings:
            name, _, value = each.partition("=")
            if name == "requests" and re.fullmatch("[1-9][0-9]{0,8}", value):
                limits = limits._replace(requests=int(value))
            elif name == "priorities":
                limits = limits._replace(priorities=priorities(value))
            else:
                raise ValueError(
                    "behind a key only requests=NUMBER and priorities=LOW:HIGH are possible, got "
                    f"{each!r}"
                )
        found[key] = limits
    return found


class Clients:
    """Knows clients by their API keys, each with its limits, and counts their requests. Without
    keys every request is accepted, and the default is of all together. `entered` runs in one event
    loop."""

    def __init__(self, limits: Mapping[str, Limits], default: Limits) -> None:
        self._limits = {_digest(key.encode()): each for key, each in limits.items()}
        self._default = default
        self._inside: Counter[str | None] = Counter()

    def require(self, request: Request) -> str | None:
        """The name of a client's key, a salt that separates its prompts from those of others; None
        without keys. Raises APIError 401: the request has none of the keys."""
        if not self._limits:
            return None
        scheme, given = _credentials(request)
        digest = _digest(given.encode("latin-1"))
        if scheme != "bearer" or not self._know(digest):
            raise _unauthorized("send the header Authorization: Bearer KEY", "Bearer")
        return digest.hex()

    def require_of_reader(self, request: Request) -> None:
        """Raise APIError 401 unless the request has one of the keys, as a bearer or as a password,
        for which browsers ask. Only for requests that change nothing: browsers send a password that
        they know with other sites' requests too."""
        scheme, given = _credentials(request)
        key = _password(given) if scheme == "basic" else given.encode("latin-1")
        if self._limits and not (scheme in ("basic", "bearer") and self._know(_digest(key))):
            raise _unauthorized(
                "send the header Authorization: Bearer KEY, or the key as a password",
                'Basic realm="paged-kv", charset="UTF-8"',
            )

    @contextmanager
    def entered(self, client: str | None) -> Iterator[None]:
        """Count a request of a client, by the name of its key (None without keys), that runs or
        waits. Raises APIError 429: the client has too many already."""
        most = self._of(client).requests
        if most is not None and self._inside[client] >= most:
            raise APIError(
                429,
                f"{self._inside[client]} requests of yours run or wait, and at most {most} may: "
                "ask again when one has ended",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        self._inside[client] += 1
        try:
            yield
        finally:
            self._inside[client] -= 1
            if not self._inside[client]:
                del self._inside[client]

    def require_priority(self, client: str | None, priority: int) -> None:
        """Raise APIError 400 unless a client may give a request this priority."""
        least, most = self._of(client).priorities
        if not least <= priority <= most:
            raise wrong_value(
                f"priority={priority} was asked, and you may ask for {least} to {most}", "priority"
            )

    def _of(self, client: str | None) -> Limits:
        return self._default if client is None else self._limits[bytes.fromhex(client)]

    def _know(self, digest: bytes) -> bool:
        # Comparing all digests takes the same time for every request.
        fits = [hmac.compare_digest(digest, each) for each in self._limits]
        return any(fits)


def salt_of(key: str | None, cache_salt: str | None) -> str | None:
    """The salt that separates a request's prompts: its key, its salt, or both."""
    return cache_salt if key is None else f"{key}:{cache_salt or ''}"


class KnownHosts:
    """The host names under which browsers may open pages: the one that the server listens at and
    others; "*" stands for any.

    A page of another site could make a browser send requests here under its own name (DNS
    rebinding), and read the answers."""

    def __init__(self, host: str, others: Iterable[str] = ()) -> None:
        own = socket.gethostname().lower()
        self._names = {"localhost", host.lower(), own, f"{own.partition('.')[0]}.local"}
        self._names |= {each.lower() for each in others}

    def require(self, request: Request) -> None:
        """Raise APIError 403 unless the Host header is an address, or a known name."""
        # The host without its port, from "[::1]:8080", "127.0.0.1:8080" or "localhost".
        host = request.headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if "*" in self._names or name.lower() in self._names:
            return
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return
        raise APIError(
            403,
            f"this page is not served as {shortened(name)}: use the address of the server or "
            "localhost, or start it with --allowed-hosts",
            code="unknown_host",
        )


def _credentials(request: Request) -> tuple[str, str]:
    """The scheme and the credentials of a request; headers are latin-1 text. Clients of Anthropic's
    API may send a key as X-Api-Key."""
    if (key := request.headers.get("x-api-key")) is not None:
        return "bearer", key.strip()
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower(), given.strip()


def _password(given: str) -> bytes:
    try:
        return base64.b64decode(given.encode("latin-1"), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _unauthorized(what_to_do: str, challenge: str) -> APIError:
    return APIError(
        401,
        f"this server needs an API key: {what_to_do}",
        code="invalid_api_key",
        headers={"WWW-Authenticate": challenge},
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Gate:
    """Open until `close`; `inside` counts the requests in progress. All of this runs in one event
    loop."""

    def __init__(self) -> None:
        self.inside = 0
        self._refusal: APIError | None = None
        self._closed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_open(self) -> bool:
        return self._refusal is None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Count a request as in progress. Raises APIError: the error that the gate was closed
        with."""
        if self._refusal is not None:
            raise self._refusal
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    def close(self, refusal: APIError) -> None:
        """Refuse all later requests; the error of the first call counts."""
        self._refusal = self._refusal or refusal
        self._closed.set()

    async def while_open(self, event: asyncio.Future[Any]) -> None:
        """Wait for an event, for as long as the gate is open. Raises APIError: the error that the
        gate was closed with before the event; or what the event does."""
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({event, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        if self._refusal is not None and not event.done():
            raise self._refusal
        event.result()

    async def wait_until_empty(self) -> None:
        await self._empty.wait()
