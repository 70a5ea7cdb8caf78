"""Asks another server to compute a prompt and to publish its pages."""

from __future__ import annotations

import http.client
import json
import logging
import re
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

PATH = "/v1/prefill"
_PROGRESS = re.compile(rb": keepalive (\d{1,12})/\d")
# What an error begins with that comes when the other server has answered already.
_ERROR = b'data: {"error":'
_MOST_QUOTED = 400
_CONNECT_S = 2.0
# The other server says at least every few seconds that it is there.
_SILENT_S = 30.0
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class OtherServer:
    """A server that computes prompts.

    Attributes:
        url: where it is.
        api_key: what it asks for, if it asks.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, bytes | str]:
        """Of a request with a body."""
        about: dict[str, bytes | str] = {"Content-Type": "application/json"}
        key = {} if self.api_key is None else {"Authorization": b"Bearer " + self.api_key.encode()}
        return about | key


class PrefillRequest:
    """One prompt on its way through another server. A thread follows the answer.

    Attributes:
        done: how many tokens the other server has computed.
        has_ended: whether it has computed all, refused, or cannot be reached.
        news: set whenever one of these changes.
        error: what went wrong.
    """

    def __init__(self, server: OtherServer, tokens: Sequence[int], salt: Hashable) -> None:
        self.done = 0
        self.has_ended = False
        self.news = threading.Event()
        self.error: str | None = None
        self._headers = server.headers
        self._url = urlsplit(server.url)
        self._body = json.dumps(
            {"prompt": list(tokens), "cache_salt": salt, "max_tokens": 1, "stream": True}
        )
        self._connection = self._connected()
        self._thread = threading.Thread(target=self._run, name="paged-kv-prefill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave: the other server stops computing."""
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(2)

    def _connected(self) -> http.client.HTTPConnection:
        is_secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=_CONNECT_S)

    def _run(self) -> None:
        try:
            self._follow()
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.error = type(error).__name__
        finally:
            self._connection.close()
            self.has_ended = True
            self.news.set()

    def _follow(self) -> None:
        connection = self._connection
        connection.connect()
        connection.sock.settimeout(_SILENT_S)
        path = self._url.path.rstrip("/") + PATH
        connection.request("POST", path, self._body, self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            hint = ", give its API key with --prefill-key" if answer.status == 401 else ""
            self.error = f"status {answer.status}{hint}"
            return
        while line := answer.readline(_LONGEST_LINE):
            if progress := _PROGRESS.match(line):
                self.done = int(progress[1])
                self.news.set()
            elif line.startswith(_ERROR):
                self.error = line[len(_ERROR) : _MOST_QUOTED].decode(errors="replace")
