"""Limits of clients by their API keys: how many requests at once, and which priorities."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from paged_kv.integrations.server.http.access import name_of_key
from paged_kv.integrations.server.http.api_errors import APIError, wrong_value


class Priorities(NamedTuple):
    """The priorities that a client may give its requests; lower ones begin sooner."""

    least: int
    most: int


class Limits(NamedTuple):
    """What a client may do.

    Attributes:
        priorities: of its requests.
        requests: that run or wait at the same time; None for any number.
    """

    priorities: Priorities
    requests: int | None = None


def priorities(text: str) -> Priorities:
    """A range such as `-10:100`, from the command line or a file of keys."""
    if found := re.fullmatch(r"(-?[0-9]{1,9}):(-?[0-9]{1,9})", text):
        least, most = int(found[1]), int(found[2])
        if least <= 0 <= most:
            return Priorities(least, most)
    raise argparse.ArgumentTypeError(f"LOW:HIGH is needed, with 0 within, got {text!r}")


def read_limits(lines: Iterable[str], default: Limits) -> dict[str, Limits]:
    """The limits of each key.

    Args:
        lines: each a key, and what differs from `default`: `KEY requests=8 priorities=-10:100`.

    Raises:
        ValueError: a line says something else.
    """
    found = {}
    for line in lines:
        key, *said = line.split()
        limits = default
        for each in said:
            name, _, value = each.partition("=")
            if name == "requests" and re.fullmatch("[1-9][0-9]{0,8}", value):
                limits = limits._replace(requests=int(value))
            elif name == "priorities":
                limits = limits._replace(priorities=_priorities(value))
            else:
                raise ValueError(
                    "behind a key only requests=NUMBER and priorities=LOW:HIGH are possible, got "
                    f"{each!r}"
                )
        found[key] = limits
    return found


def _priorities(text: str) -> Priorities:
    try:
        return priorities(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"priorities={text}: {error}") from None


class ClientLimits:
    """Counts the requests of each client. All of this but `require_priority` runs in one event
    loop.

    Args:
        by_key: the limits of each API key.
        default: of clients without a key, all together.
    """

    def __init__(self, by_key: Mapping[str, Limits], default: Limits) -> None:
        self._by_client = {name_of_key(key): limits for key, limits in by_key.items()}
        self._default = default
        self._inside: Counter[str | None] = Counter()

    @contextmanager
    def entered(self, client: str | None) -> Iterator[None]:
        """Count a request that runs or waits.

        Args:
            client: the name of its key; None without keys.

        Raises:
            APIError: 429, the client has too many already.
        """
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
        return self._default if client is None else self._by_client.get(client, self._default)
