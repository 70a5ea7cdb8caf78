"""Records the requests that batches serve, to replay them with another budget, format or policy,
and reads traces: also those in Mooncake's format, whose ids stand for 512 tokens each and which say
nothing of a pool.

A trace is text, with a JSON object on each line. The first line describes the pool:

    paged_kv_trace   the version of the format
    written_by       the version of paged_kv
    page_size        tokens that each of `hash_ids` stands for
    max_bytes        the budget of the pool
    page_format      that of full pages
    layers           layers that are alike: see `TracedLayers`

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

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from statistics import median
from time import monotonic
from typing import IO, Any, NamedTuple
from weakref import ref

from paged_kv import __version__
from paged_kv.kernels.pages.page_format import PAGE_SIZE, LayerGeometry
from paged_kv.lru import LRU
from paged_kv.pool.layer_kinds import Window
from paged_kv.pool.page_pool import PagePool
from paged_kv.prefix.keeping import Rate, Rates

logger = logging.getLogger("paged_kv")

# Pages that are remembered, to find requests that begin alike: a few MB.
MOST_PAGES = 1 << 16
VERSION = 2
MOONCAKE_BLOCK = 512
# For each number of a request the least and the most. More tokens would fill the memory.
_LIMITS = {"timestamp": (0, 1 << 44), "input_length": (1, 1 << 24), "output_length": (0, 1 << 24)}
# Ids are tokens of a replay, which MLX holds in 32 bits. From here on each is of one request alone.
_OWN = 1 << 30

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
            with suppress(OSError):
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


@dataclass(frozen=True)
class TracedLayers:
    """Layers that are alike: `count` of them, each with keys of `k_heads` heads of `k_dim` numbers,
    and values. `dtype` is MLX's name. `window` and `sink_tokens` are those of `Window`; without a
    window it is None."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    dtype: str
    window: int | None = None
    sink_tokens: int = 0
    count: int = 1

    @classmethod
    def of(cls, geometry: LayerGeometry, window: Window | None) -> TracedLayers:
        """One layer of this geometry and with this window."""
        keys, values = (geometry.k_heads, geometry.k_dim), (geometry.v_heads, geometry.v_dim)
        size, sink_tokens = (window.size, window.sink_tokens) if window else (None, 0)
        return cls(*keys, *values, str(geometry.k_dtype).rpartition(".")[2], size, sink_tokens)


# Llama 3.1 8B, for traces that say nothing of a model.
LLAMA = TracedLayers(8, 128, 8, 128, "float16", count=32)


@dataclass(frozen=True, eq=False)
class TracedRequest:
    """A request. `number` is its place in the order of arrival, `arrives` milliseconds since the
    trace began; lengths are at least 1. `block_ids` are the `hash_ids` of its first tokens, each of
    which stands for `block_size` tokens."""

    number: int
    arrives: int
    prompt_length: int
    answer_length: int
    block_ids: Sequence[int]
    block_size: int

    def token(self, position: int) -> int:
        """A made-up token for a position: that of others where they are alike, or its own."""
        block = position // self.block_size
        return self.block_ids[block] if block < len(self.block_ids) else _OWN + self.number

    @property
    def prompt(self) -> list[int]:
        blocks = ([block] * self.block_size for block in self.block_ids)
        known = [*chain.from_iterable(blocks)][: self.prompt_length]
        return known + [_OWN + self.number] * (self.prompt_length - len(known))


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival, and what the recorder says of the pool and the steps.
    What a trace does not say is of a model of 8 billion parameters; the times are about those on a
    large Mac."""

    requests: list[TracedRequest]
    layers: list[TracedLayers]
    max_bytes: int | None = None
    page_format: str = "fp16"
    decode_ms: float = 30.0
    prompt_ms: float = 1.0


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, is of another version, or a line is wrong; the message names the
            file and the line, what was found and what is needed.
    """
    header: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    # A binary file is refused for what its first line holds, not for its encoding.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                content = _object(line)
                if number == 1 and "paged_kv_trace" in content:
                    _require_version(header := content)
                else:
                    _require_request(content)
                    lines.append(content)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not lines:
        raise ValueError(f"{path} has no requests: record until at least one has ended")
    try:
        return _trace(header, lines)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has a broken first line or times ({error}): record again"
        ) from None


def _trace(header: dict[str, Any], lines: list[dict[str, Any]]) -> Trace:
    names = ("max_bytes", "page_format")
    known: dict[str, Any] = {name: header[name] for name in names if name in header}
    for name in ("decode_ms", "prompt_ms"):
        if times := [float(each[name]) for each in lines if each.get(name)]:
            known[name] = median(times)
    lines.sort(key=lambda each: int(each["timestamp"]))
    requests = [
        TracedRequest(
            number,
            line["timestamp"] - lines[0]["timestamp"],
            line["input_length"],
            max(1, line["output_length"]),
            line["hash_ids"],
            header.get("page_size", MOONCAKE_BLOCK),
        )
        for number, line in enumerate(lines)
    ]
    layers = [TracedLayers(**each) for each in header.get("layers", [])] or [LLAMA]
    return Trace(requests, layers, **known)


def _require_version(header: dict[str, Any]) -> None:
    version = header["paged_kv_trace"]
    if version != VERSION:
        writer = header.get("written_by", "an earlier one, which recorded the events of blocks")
        raise ValueError(
            f"version {version} of the format is of another paged_kv ({writer}): this one reads "
            f"requests, version {VERSION}. Record them again with `paged-kv trace record`"
        )


def _object(line: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        if isinstance(content := json.loads(line), dict):
            return content
    raise ValueError(
        f"{line[:80]!r} is no JSON object: give a trace of `paged-kv trace record`, or one in "
        "Mooncake's format"
    )


def _require_request(content: dict[str, Any]) -> None:
    for name, (least, most) in _LIMITS.items():
        number = content.get(name)
        if type(number) is not int or not least <= number <= most:
            found = repr(number)[:80]
            raise ValueError(f"{name} is {found}: it must be an integer from {least} to {most:,}")
    ids = content.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < _OWN for each in ids):
        found = repr(ids)[:80]
        raise ValueError(f"hash_ids is {found}: it must be a list of integers from 0 to 2^30 - 1")
