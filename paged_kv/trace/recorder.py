"""Records the events of a process's blocks, to replay them with other parameters.

A trace is text, one event per line. The first line is JSON, {"paged_kv_trace": 1, "page_size": 256,
"time": seconds since 1970}. Every other line is a letter, then integers, then possibly a name.
Pools, groups, tables, requests, prefixes and cached out-of-window pages ("retired") are numbered
through the file, each kind separately.

    + ms                         `ms` milliseconds have passed since the last such line
    P pool budget bytes name     a pool and its budget of `bytes` bytes, possibly shared
    G group pool entries head window keep    a group of layers, before its first table: the reused
                                 entries of its rings, the entries of sink tokens before them, the
                                 window and the sink tokens in tokens; all 0 without a window
    B group bytes format         a block of that format takes `bytes` bytes from now on
    n table group format first   a new block table: the formats of its full blocks and of the first
                                 of these, which is left out if it is the same
    w table start end fresh      tokens [start, end) are written, with `fresh` new blocks at the end
    c table blocks               `blocks` shared blocks were copied for the next write
    f table fork                 a fork shares all blocks of a table
    t table tokens               a table now holds `tokens` tokens
    d table                      a table is dropped
    k table tokens prefix blocks the prefix index holds the first tokens of a table as a prefix,
                                 with `blocks` blocks that it did not hold before
    a table tokens prefix        a table takes over a prefix from the index
    r retired table entry        the page of a ring's entry is cached as the window passes it
    s retired group format       so is a page that never was in the ring
    u retired                    the page is no longer cached
    b table tokens retired...    a ring takes over such pages, in the order of its entries
    l pool tokens found          a prompt was looked up: `found` of its tokens were cached
    e prefix blocks              `blocks` blocks of a prefix were evicted
    q request pool prompt most   a request of a batch waits to begin: it has a prompt of `prompt`
                                 tokens, and may generate `most` tokens
    h request other pages        `pages` first pages of its prompt are those of an earlier request,
                                 which both share while they run
    i request                    it runs, for the first time or after it was preempted
    p request                    it was preempted, and waits again
    o request tokens             it has ended after `tokens` generated tokens

Consecutive small writes of one table are joined, up to 16 tokens, if they need no block. A trace
holds no tokens, and nothing derived from them but how much prompts have in common.

A trace ends early if its file cannot be written any more: that is logged once, and counted in the
statistics of its pools.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.events import NO_EVENTS, Events, Group, Table
from paged_kv.allocator.ring import Ring
from paged_kv.checks import file_path

Known = TypeVar("Known")
Arguments = ParamSpec("Arguments")
Told = Callable[Concatenate["TracedPool", Arguments], None]

logger = logging.getLogger("paged_kv")

VERSION = 1
PAGE_SIZE = 256
JOINED_TOKENS = 16
FLUSH_S = 1.0
# Pages of prompts that are remembered, to find those that begin alike: a few MB.
MOST_PROMPT_PAGES = 1 << 16
_NUMBERED = ("pool", "group", "table", "request", "prefix", "retired")

_files: dict[Path, TraceFile] = {}


class TraceEvent(StrEnum):
    """The first letter of a line. The module's docstring says what follows each."""

    TIME = "+"
    POOL = "P"
    GROUP = "G"
    BLOCK_BYTES = "B"
    NEW_TABLE = "n"
    WRITE = "w"
    COPY_ON_WRITE = "c"
    FORK = "f"
    TRIM = "t"
    DROP = "d"
    INSERT_PREFIX = "k"
    ADOPT_PREFIX = "a"
    CACHE_RING_BLOCK = "r"
    CACHE_UNSEEN_BLOCK = "s"
    EVICT_BLOCK = "u"
    BEGIN_RING = "b"
    LOOK_UP = "l"
    EVICT_PREFIX = "e"
    ARRIVE = "q"
    SHARE_PROMPT = "h"
    BEGIN = "i"
    PREEMPT = "p"
    END = "o"


def events_of(budget: ByteBudget, name: str, path: str | os.PathLike[str] | None) -> Events:
    """The recorder of a pool with this budget and name, which writes to the file named by `path` or
    else by PAGED_KV_TRACE. Without a file, it records nothing. "%p" in a file's name becomes the
    process id.

    Raises:
        TypeError, ValueError: `path` is no path.
        OSError: the file cannot be written, or is not empty.
    """
    file = os.environ.get("PAGED_KV_TRACE") if path is None else file_path("trace", path)
    if not file or str(file) == os.devnull:
        return NO_EVENTS
    full = Path(str(file).replace("%p", str(os.getpid()))).absolute()
    if full not in _files or _files[full].pid != os.getpid():
        _files[full] = TraceFile(full)
    return TracedPool(_files[full], budget, name)


class TraceFile:
    """Writes the lines of a trace, from any thread. A forked child process writes none.

    Args:
        path: the file, which must be missing or empty.
        clock: returns seconds since any fixed time.

    Attributes:
        has_stopped: whether no more lines are written, because one could not be.

    Raises:
        OSError: the file cannot be written, or is not empty.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.pid = os.getpid()
        self.has_stopped = False
        self._path = path
        self.numbers = {kind: count() for kind in _NUMBERED}
        self.pools: weakref.WeakSet[TracedPool] = weakref.WeakSet()
        self._budgets: list[ByteBudget] = []
        self._lock = threading.Lock()
        self._file: IO[str] = _opened(path)
        self._clock = clock
        self._last = self._flushed = clock()
        header = {"paged_kv_trace": VERSION, "page_size": PAGE_SIZE, "time": time.time()}
        self._file.write(json.dumps(header) + "\n")
        # From now on no other recorder takes the file for an empty one.
        self._file.flush()
        atexit.register(self._end)

    def line(self, *words: Any) -> None:
        """Write a line, preceded by a `+` line if time has passed.

        Raises:
            OSError: it cannot be written.
        """
        if self.has_stopped or self.pid != os.getpid():
            return
        with self._lock:
            now = self._clock()
            passed = int((now - self._last) * 1000)
            if passed:
                self._last += passed / 1000
                self._file.write(f"{TraceEvent.TIME} {passed}\n")
            self._file.write(" ".join(map(str, words)) + "\n")
            if now - self._flushed > FLUSH_S:
                self._flushed = now
                self._file.flush()

    def number_of(self, budget: ByteBudget) -> int:
        """The number of a budget, in the order of first use."""
        for number, known in enumerate(self._budgets):
            if known is budget:
                return number
        self._budgets.append(budget)
        return len(self._budgets) - 1

    def stop(self, error: Exception) -> None:
        """Write no more lines, because of an error, and say so."""
        self.has_stopped = True
        logger.error(
            "the trace %s ends here, and what follows is not recorded: %s. Free space for it, or "
            "name another file with trace= or PAGED_KV_TRACE, and start again",
            self._path,
            error,
        )
        # Closing would write once more what could not be written.
        with contextlib.suppress(Exception):
            self._file.close()

    def _end(self) -> None:
        for pool in self.pools:
            pool.flush()

    def flush(self) -> None:
        """Flush the file, so that readers see all lines.

        Raises:
            OSError: they cannot be written.
        """
        if self.pid == os.getpid() and not self.has_stopped:
            with self._lock:
                self._file.flush()


def _opened(path: Path) -> IO[str]:
    try:
        file = path.open("a", buffering=1 << 16)
    except OSError as error:
        raise type(error)(
            f"no trace can be written to {path} ({error.strerror}): name a file in a folder that "
            "exists and is writable"
        ) from None
    if os.fstat(file.fileno()).st_size:
        file.close()
        raise FileExistsError(
            f"{path} exists, and a trace would overwrite it: remove it, or name another file (%p "
            "in a name becomes the process id)"
        )
    return file


def _stopping(method: Told[Arguments]) -> Told[Arguments]:
    """A method that stops the trace where the given one raises an error."""

    def stopping(pool: TracedPool, /, *args: Arguments.args, **options: Arguments.kwargs) -> None:
        if not pool.has_stopped:
            try:
                method(pool, *args, **options)
            except Exception as error:
                pool.file.stop(error)

    stopping.__doc__ = method.__doc__
    return stopping


class TracedPool(Events):
    """Writes the events of one pool, which `Events` describes. Called under the pool's lock."""

    def __init__(self, file: TraceFile, budget: ByteBudget, name: str) -> None:
        self.file = file
        file.pools.add(self)
        self._pool = next(file.numbers["pool"])
        self._groups: dict[Group, int] = {}
        self._sizes: dict[tuple[Group, str], int] = {}
        self._rings: dict[Group, Ring | None] = {}
        self._tables: dict[Table, int] = {}
        self._joined: dict[Table, tuple[int, int]] = {}
        self._adopting: dict[Table, str | None] = {}
        self._fresh: dict[tuple[Group, int], None] = {}
        self._prefix_of: dict[tuple[Group, int], int] = {}
        self._out_of_window: dict[tuple[Group, int], int] = {}
        # The number of each request, and the tokens that it has generated.
        self._requests: dict[Hashable, int] = {}
        self._generated: Counter[Hashable] = Counter()
        # The request that had a prompt's pages first, by a hash of them and of those before.
        self._prompts: dict[int, int] = {}
        file.line(TraceEvent.POOL, self._pool, file.number_of(budget), budget.max_bytes, name)

    def flush(self) -> None:
        """Write joined events and flush the file."""
        for table in list(self._joined):
            self._flushed_table(table)
        self.file.flush()

    @property
    def has_stopped(self) -> bool:
        return self.file.has_stopped

    def sized(self, allocator: Group, block_bytes: Mapping[str, int]) -> None:
        if allocator not in self._groups:
            self._groups[allocator] = next(self.file.numbers["group"])
        for name, size in block_bytes.items():
            if self._sizes.get((allocator, name)) != size:
                self._sizes[allocator, name] = size
                self.file.line(TraceEvent.BLOCK_BYTES, self._groups[allocator], size, name)

    def made(self, table: Table) -> None:
        group = self._groups[table.allocator]
        if table.allocator not in self._rings:
            self._rings[table.allocator] = table.ring
            ring = table.ring or Ring(0)
            shape = ring.entries, ring.head, ring.window or 0, ring.sink_tokens
            self.file.line(TraceEvent.GROUP, group, self._pool, *shape)
        formats = [table.page_format]
        if table.first_format != table.page_format:
            formats.append(table.first_format)
        self.file.line(TraceEvent.NEW_TABLE, self._number(table), group, *formats)

    def forked(self, table: Table, fork: Table) -> None:
        self.file.line(TraceEvent.FORK, self._flushed_table(table), self._number(fork))

    def written(self, table: Table, start: int, end: int, fresh: int, copied: int) -> None:
        first, last = self._joined.get(table, (start, start))
        joins = not fresh and not copied and last == start and end - first <= JOINED_TOKENS
        if joins:
            self._joined[table] = first, end
            return
        number = self._flushed_table(table)
        if copied:
            self.file.line(TraceEvent.COPY_ON_WRITE, number, copied)
        if fresh or copied or end - start > JOINED_TOKENS:
            self.file.line(TraceEvent.WRITE, number, start, end, fresh)
        else:
            self._joined[table] = start, end

    def trimmed(self, table: Table) -> None:
        number = self._flushed_table(table)
        if table not in self._adopting:
            self.file.line(TraceEvent.TRIM, number, table.tokens)
            return
        known = self._adopting.pop(table)
        if known is None:
            # The trace does not know this prefix: record the tokens as the table's own write.
            self.file.line(TraceEvent.WRITE, number, 0, table.tokens, 0)
        else:
            event = TraceEvent.ADOPT_PREFIX if table.ring is None else TraceEvent.BEGIN_RING
            self.file.line(event, number, table.tokens, known)

    def dropped(self, table: Table) -> None:
        self.file.line(TraceEvent.DROP, self._flushed_table(table))
        del self._tables[table]
        self._adopting.pop(table, None)

    def kept(self, allocator: Group, block: int) -> None:
        if self._rings.get(allocator) is None:
            self._fresh[allocator, block] = None
            return
        number = self._out_of_window[allocator, block] = next(self.file.numbers["retired"])
        tables = [each for each in self._tables if each.allocator is allocator]
        holder = next((each for each in tables if block in each.blocks), None)
        if holder is None:
            page_format = allocator.format_of(block).name
            self.file.line(
                TraceEvent.CACHE_UNSEEN_BLOCK, number, self._groups[allocator], page_format
            )
        else:
            table = self._flushed_table(holder)
            self.file.line(TraceEvent.CACHE_RING_BLOCK, number, table, holder.blocks.index(block))

    def inserted(self, table: Table, num_tokens: int) -> None:
        mine = [each for each in self._fresh if each[0] is table.allocator]
        for each in mine:
            del self._fresh[each]
        if mine:
            prefix = next(self.file.numbers["prefix"])
            self._prefix_of.update(dict.fromkeys(mine, prefix))
            self.file.line(
                TraceEvent.INSERT_PREFIX, self._flushed_table(table), num_tokens, prefix, len(mine)
            )

    def adopted(self, table: Table, blocks: Sequence[int]) -> None:
        # The next event, `trimmed`, gives the number of tokens.
        known = [(table.allocator, block) for block in blocks]
        if table.ring is None:
            prefix = self._prefix_of.get(known[-1])
            self._adopting[table] = None if prefix is None else str(prefix)
        else:
            self._adopting[table] = " ".join([str(self._out_of_window[each]) for each in known])

    def looked_up(self, num_tokens: int, found: int) -> None:
        self.file.line(TraceEvent.LOOK_UP, self._pool, num_tokens, found)

    def arrived(self, request: Hashable, prompt_tokens: int, max_tokens: int) -> None:
        if request not in self._requests:
            number = self._requests[request] = next(self.file.numbers["request"])
            self.file.line(TraceEvent.ARRIVE, number, self._pool, prompt_tokens, max_tokens)

    def shares(self, request: Hashable, prompt: Sequence[int], salt: Hashable) -> None:
        number = self._requests[request]
        pages, other, shared = hash(salt), number, 0
        # Each request computes the last token of its prompt itself.
        for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE):
            pages = hash((pages, *prompt[end - PAGE_SIZE : end]))
            first = self._prompts.setdefault(pages, number)
            if first != number:
                other, shared = first, end // PAGE_SIZE
        while len(self._prompts) > MOST_PROMPT_PAGES:
            del self._prompts[next(iter(self._prompts))]
        if shared:
            self.file.line(TraceEvent.SHARE_PROMPT, number, other, shared)

    def begun(self, request: Hashable) -> None:
        self.file.line(TraceEvent.BEGIN, self._requests[request])

    def generated(self, request: Hashable) -> None:
        self._generated[request] += 1

    def preempted(self, request: Hashable) -> None:
        self.file.line(TraceEvent.PREEMPT, self._requests[request])

    def ended(self, request: Hashable) -> None:
        if request in self._requests:
            generated = self._generated.pop(request, 0)
            self.file.line(TraceEvent.END, self._requests.pop(request), generated)

    def evicted(self, allocator: Group, block: int) -> None:
        if (allocator, block) in self._out_of_window:
            self.file.line(TraceEvent.EVICT_BLOCK, self._out_of_window.pop((allocator, block)))
        self._fresh.pop((allocator, block), None)
        prefix = self._prefix_of.pop((allocator, block), None)
        if prefix is not None:
            self.file.line(TraceEvent.EVICT_PREFIX, prefix, 1)

    def moved(self, allocator: Group, moves: Mapping[int, int]) -> None:
        _move(self._prefix_of, allocator, moves)
        _move(self._out_of_window, allocator, moves)
        _move(self._fresh, allocator, moves)

    def _number(self, table: Table) -> int:
        self._tables[table] = next(self.file.numbers["table"])
        return self._tables[table]

    def _flushed_table(self, table: Table) -> int:
        """Write the table's joined writes; returns its number."""
        number = self._tables[table]
        if table in self._joined:
            self.file.line(TraceEvent.WRITE, number, *self._joined.pop(table), 0)
        return number


# A change that is told of has been made, so nothing here may raise an error.
for _name in ("flush", *[name for name, each in vars(Events).items() if inspect.isfunction(each)]):
    setattr(TracedPool, _name, _stopping(getattr(TracedPool, _name)))


def _move(
    known: dict[tuple[Group, int], Known],
    allocator: Group,
    moves: Mapping[int, int],
) -> None:
    """Rename the keys of `known` after blocks moved."""
    found = [(target, (allocator, source)) for source, target in moves.items()]
    moved = {(allocator, target): known.pop(key) for target, key in found if key in known}
    known.update(moved)
