"""Records the requests that batches serve, to replay them with another budget, format or policy.

A trace is text, with a JSON object on each line. The first line describes the pool:

    paged_kv_trace   the version of the format
    written_by       the version of paged_kv
    page_size        tokens that each of `hash_ids` stands for
    max_bytes        the budget of the pool
    page_format      that of full pages
    layers           layers that are alike: see `paged_kv.trace.requests.TracedLayers`

Every other line is a request, in the order of their ends, with the fields of the traces that
Mooncake has published (https://github.com/kvcache-ai/Mooncake) and two more:

    timestamp        milliseconds from the beginning of the trace to the request's arrival
    input_length     tokens of its prompt
    output_length    tokens that it generated
    hash_ids         a number for each full page of its prompt and its answer. Equal numbers stand
                     for equal tokens, in the page and before it
    decode_ms        what a step of decode took at its end; null before the first
    prompt_ms        what a token of a prompt took at its end; null before the first

A trace holds no tokens. The numbers count pages in the order in which they were first seen.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from time import monotonic
from typing import IO, Any, NamedTuple
from weakref import ref

from paged_kv import __version__
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.lru import LRU
from paged_kv.pool.page_pool import PagePool
from paged_kv.prefix.keeping import Rate, Rates
from paged_kv.trace.requests import VERSION, TracedLayers

logger = logging.getLogger("paged_kv")

# Pages that are remembered, to find requests that begin alike: a few MB.
MOST_PAGES = 1 << 16

_recorders: dict[Path, RequestRecorder] = {}


def request_recorder() -> RequestRecorder | None:
    """What records to the file that PAGED_KV_TRACE names; None if it names none. "%p" in the name
    becomes the process id.

    Raises:
        OSError: the file cannot be written, or is not empty.
    """
    if not (named := os.environ.get("PAGED_KV_TRACE")):
        return None
    path = Path(named.replace("%p", str(os.getpid()))).absolute()
    if path not in _recorders or _recorders[path].pid != os.getpid():
        _recorders[path] = RequestRecorder(path)
    return _recorders[path]


class RecordedRequest(NamedTuple):
    """A request that has not ended. `since` is when it arrived, by `time.monotonic`."""

    since: float
    prompt: list[int]
    answer: list[int]


class RequestRecorder:
    """Writes the requests of one pool, from any thread; processes that are forked write none. No
    method raises an `Exception`: a trace whose file cannot be written ends, which is logged.

    Args:
        path: the file, which must be missing or empty.

    Raises:
        OSError: the file cannot be written, or is not empty.
    """

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        self._path = path
        self._file: IO[str] | None = open_trace(path)
        self._lock = threading.Lock()
        self._began = monotonic()
        self._pool: Callable[[], PagePool | None] = lambda: None
        self._layers: list[dict[str, Any]] = []
        # The number of each page, by a hash of its tokens and of those before.
        self._ids: LRU[int, int] = LRU(MOST_PAGES)
        self._numbers = count()

    def is_of(self, pool: PagePool) -> bool:
        """Whether the trace is of that pool: the first one that asks, or the next one with the same
        layers once that is gone, as when a server loads its model again."""
        header = _header(pool)
        with self._lock:
            if not self._layers:
                self._write(header)
            if self._pool() is None and self._layers in ([], header["layers"]):
                self._pool, self._layers = ref(pool), header["layers"]
            if self._pool() is not pool:
                logger.warning(
                    "requests of %s are not recorded: %s is of another pool", pool.name, self._path
                )
            return self._pool() is pool

    def end(self, request: RecordedRequest, salt: Hashable, rates: Rates) -> None:
        """Write a request that has ended. Only those of the same salt have pages in common."""
        with self._lock:
            self._write(
                {
                    "timestamp": max(0, round((request.since - self._began) * 1000)),
                    "input_length": len(request.prompt),
                    "output_length": len(request.answer),
                    "hash_ids": list(self._page_ids([*request.prompt, *request.answer], salt)),
                    "decode_ms": _milliseconds(rates.decoding),
                    "prompt_ms": _milliseconds(rates.computing),
                }
            )

    def _page_ids(self, tokens: list[int], salt: Hashable) -> Iterator[int]:
        page = hash((salt,))
        for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
            page = hash((page, *tokens[start : start + PAGE_SIZE]))
            number = self._ids[page] if page in self._ids else next(self._numbers)
            self._ids[page] = number
            yield number

    def _write(self, content: dict[str, Any]) -> None:
        if self._file is None or self.pid != os.getpid():
            return
        try:
            self._file.write(json.dumps(content) + "\n")
        except OSError as error:
            logger.error(
                "the trace %s ends here, and what follows is not recorded: %s. Free space for it, "
                "or name another file with PAGED_KV_TRACE, and start again",
                *(self._path, error),
            )
            # Closing would write once more what could not be written.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _milliseconds(rate: Rate) -> float | None:
    seconds = rate.seconds_for(1)
    return None if seconds is None else round(seconds * 1000, 4)


def _header(pool: PagePool) -> dict[str, Any]:
    alike = Counter(
        TracedLayers.of(pages.geometry, group.window)
        for group in pool.groups
        for pages in group.pages.values()
    )
    return {
        "paged_kv_trace": VERSION,
        "written_by": __version__,
        "page_size": PAGE_SIZE,
        "max_bytes": pool.budget.max_bytes,
        "page_format": "auto" if pool.requantisation_policy else pool.page_format.name,
        "layers": [asdict(layers) | {"count": number} for layers, number in alike.items()],
    }


def open_trace(path: Path) -> IO[str]:
    """Open a new trace, of which each line is written at once.

    Raises:
        OSError: it cannot be written, or is not empty.
    """
    try:
        file = path.open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        message = f"no trace can be written to {path} ({error.strerror}): name another file"
        raise type(error)(message) from None
    if file.tell():
        file.close()
        raise FileExistsError(
            f"{path} is not empty, and a trace would overwrite it: remove it, or name another file "
            "(%p in a name becomes the process id)"
        )
    return file
