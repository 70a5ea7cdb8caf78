"""Records what happens to the blocks of a process, to be replayed with other parameters.

A trace is text, one event a line. The first line is JSON, {"paged_kv_trace": 1, "page_size": 256,
"time": seconds since 1970}. In the others a letter is followed by integers, and a name at the
end. Tables, groups, prefixes and retired pages have numbers, each kind its own, counted through
the file.

    + ms                         so many milliseconds have passed since the last such line
    P pool budget bytes name     a pool, and its budget of so many bytes, maybe shared with others
    G group pool entries head window keep    a group of layers, before its first table: the
                                 entries of its rings, those at the head that stay, and the tokens
                                 that are seen, the latest and the first; all 0 without a window
    B group bytes format         from now on a block of that format takes so many bytes
    n table group format         a new block table
    w table start end fresh      tokens [start, end) are written, into `fresh` new blocks at the end
    c table blocks               for that, so many shared blocks were copied
    f table fork                 a second table shares what one holds
    t table tokens               a table holds so many tokens from now on
    d table                      a table is dropped
    k table tokens prefix blocks the prefix index holds the first tokens of a table, as a prefix;
                                 so many of its blocks it did not hold before
    a table tokens prefix        a table begins with what the index holds of a prefix
    r retired table entry        a page is kept that a ring passes, for prompts that begin alike
    s retired group format       so is a page that passes without ever being in the ring
    u retired                    nobody keeps it any more
    b table tokens retired...    a ring begins with such pages, in the order of its entries
    l pool tokens found          a prompt was looked up, and so many of its tokens were found
    e prefix blocks              so many blocks of a prefix were evicted

Small writes of one table in a row are joined, up to 16 tokens, if they need no block. There is
nothing of what tokens say, and nothing made of it.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.events import NO_EVENTS, Events
from paged_kv.allocator.ring import Ring
from paged_kv.checks import file_path

if TYPE_CHECKING:
    from paged_kv.allocator.block_allocator import BlockAllocator
    from paged_kv.allocator.block_table import BlockTable

Known = TypeVar("Known")

VERSION = 1
PAGE_SIZE = 256
JOINED_TOKENS = 16
FLUSH_S = 1.0

_files: dict[Path, TraceFile] = {}


def events_of(budget: ByteBudget, name: str, path: str | os.PathLike[str] | None) -> Events:
    """Records the events of the pool that has this budget and name into a file; nothing if neither
    `path` nor PAGED_KV_TRACE names one. "%p" in a file's name becomes the number of the process.

    Raises:
        TypeError, ValueError: `path` is no path.
        OSError: the file cannot be written, or is not empty.
    """
    file = os.environ.get("PAGED_KV_TRACE") if path is None else file_path("trace", path)
    if not file:
        return NO_EVENTS
    full = Path(str(file).replace("%p", str(os.getpid()))).absolute()
    if full not in _files or _files[full].pid != os.getpid():
        _files[full] = TraceFile(full)
    return TracedPool(_files[full], budget, name)


class TraceFile:
    """Lines of a trace, from any thread. A process that is forked from this one adds none.

    Args:
        path: the file, which must not be there yet, or be empty.
        clock: seconds since whenever.

    Raises:
        OSError: the file cannot be written, or is not empty.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.pid = os.getpid()
        self.numbers = {kind: count() for kind in ("pool", "group", "table", "prefix", "retired")}
        self.pools: weakref.WeakSet[TracedPool] = weakref.WeakSet()
        self._budgets: list[ByteBudget] = []
        self._lock = threading.Lock()
        self._file: IO[str] = _opened(path)
        self._clock = clock
        self._last = self._flushed = clock()
        header = {"paged_kv_trace": VERSION, "page_size": PAGE_SIZE, "time": time.time()}
        self._file.write(json.dumps(header) + "\n")
        # From now on nobody takes the file for an empty one.
        self._file.flush()
        atexit.register(self._end)

    def line(self, *words: Any) -> None:
        """Add a line, and before it how much time has passed."""
        if self.pid != os.getpid():
            return
        with self._lock:
            now = self._clock()
            passed = int((now - self._last) * 1000)
            if passed:
                self._last += passed / 1000
                self._file.write(f"+ {passed}\n")
            self._file.write(" ".join(map(str, words)) + "\n")
            if now - self._flushed > FLUSH_S:
                self._flushed = now
                self._file.flush()

    def number_of(self, budget: ByteBudget) -> int:
        """Budgets count as they come."""
        for number, known in enumerate(self._budgets):
            if known is budget:
                return number
        self._budgets.append(budget)
        return len(self._budgets) - 1

    def _end(self) -> None:
        for pool in self.pools:
            pool.flush()
        self.flush()

    def flush(self) -> None:
        """Let others read what was added."""
        if self.pid == os.getpid():
            with self._lock:
                self._file.flush()


def _opened(path: Path) -> IO[str]:
    try:
        file = path.open("a", buffering=1 << 16)
    except OSError as error:
        raise type(error)(
            f"no trace can be written to {path} ({error.strerror}): name a file in a folder that "
            "is there and can be written"
        ) from None
    if os.fstat(file.fileno()).st_size:
        file.close()
        raise FileExistsError(
            f"{path} is there already, and a trace would write over it: remove it, or name another "
            "file (%p in a name becomes the number of the process)"
        )
    return file


class TracedPool(Events):
    """Writes the events of one pool. Called under the pool's lock."""

    def __init__(self, file: TraceFile, budget: ByteBudget, name: str) -> None:
        self._file = file
        file.pools.add(self)
        self._pool = next(file.numbers["pool"])
        self._groups: dict[BlockAllocator, int] = {}
        self._sizes: dict[tuple[BlockAllocator, str], int] = {}
        self._rings: dict[BlockAllocator, Ring | None] = {}
        self._tables: dict[BlockTable, int] = {}
        self._joined: dict[BlockTable, tuple[int, int]] = {}
        self._adopting: dict[BlockTable, str | None] = {}
        self._fresh: dict[tuple[BlockAllocator, int], None] = {}
        self._prefix_of: dict[tuple[BlockAllocator, int], int] = {}
        self._out_of_window: dict[tuple[BlockAllocator, int], int] = {}
        file.line("P", self._pool, file.number_of(budget), budget.max_bytes, name)

    def flush(self) -> None:
        """Let others read all that has happened."""
        for table in list(self._joined):
            self._settled(table)
        self._file.flush()

    def sized(self, allocator: BlockAllocator, block_bytes: Mapping[str, int]) -> None:
        """See `Events`."""
        if allocator not in self._groups:
            self._groups[allocator] = next(self._file.numbers["group"])
        for name, size in block_bytes.items():
            if self._sizes.get((allocator, name)) != size:
                self._sizes[allocator, name] = size
                self._file.line("B", self._groups[allocator], size, name)

    def made(self, table: BlockTable) -> None:
        """See `Events`."""
        group = self._groups[table.allocator]
        if table.allocator not in self._rings:
            self._rings[table.allocator] = table.ring
            ring = table.ring or Ring(0)
            shape = ring.entries, ring.head, ring.window or 0, ring.sink_tokens
            self._file.line("G", group, self._pool, *shape)
        self._file.line("n", self._number(table), group, table.page_format)

    def forked(self, table: BlockTable, fork: BlockTable) -> None:
        """See `Events`."""
        self._file.line("f", self._settled(table), self._number(fork))

    def written(self, table: BlockTable, start: int, end: int, fresh: int, copied: int) -> None:
        """See `Events`."""
        first, last = self._joined.get(table, (start, start))
        joins = not fresh and not copied and last == start and end - first <= JOINED_TOKENS
        if joins:
            self._joined[table] = first, end
            return
        number = self._settled(table)
        if copied:
            self._file.line("c", number, copied)
        if fresh or copied or end - start > JOINED_TOKENS:
            self._file.line("w", number, start, end, fresh)
        else:
            self._joined[table] = start, end

    def trimmed(self, table: BlockTable) -> None:
        """See `Events`."""
        number = self._settled(table)
        if table not in self._adopting:
            self._file.line("t", number, table.tokens)
            return
        known = self._adopting.pop(table)
        if known is None:
            # Not of what a table was inserted with: as if they were its own.
            self._file.line("w", number, 0, table.tokens, 0)
        else:
            self._file.line("a" if table.ring is None else "b", number, table.tokens, known)

    def dropped(self, table: BlockTable) -> None:
        """See `Events`."""
        self._file.line("d", self._settled(table))
        del self._tables[table]
        self._adopting.pop(table, None)

    def kept(self, allocator: BlockAllocator, block: int) -> None:
        """See `Events`."""
        if self._rings.get(allocator) is None:
            self._fresh[allocator, block] = None
            return
        number = self._out_of_window[allocator, block] = next(self._file.numbers["retired"])
        tables = [each for each in self._tables if each.allocator is allocator]
        holder = next((each for each in tables if block in each.blocks), None)
        if holder is None:
            page_format = allocator.format_of(block).name
            self._file.line("s", number, self._groups[allocator], page_format)
        else:
            table = self._settled(holder)
            self._file.line("r", number, table, holder.blocks.index(block))

    def inserted(self, table: BlockTable, num_tokens: int) -> None:
        """See `Events`."""
        mine = [each for each in self._fresh if each[0] is table.allocator]
        for each in mine:
            del self._fresh[each]
        if mine:
            prefix = next(self._file.numbers["prefix"])
            self._prefix_of.update(dict.fromkeys(mine, prefix))
            self._file.line("k", self._settled(table), num_tokens, prefix, len(mine))

    def adopted(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """See `Events`."""
        # How many of their tokens it begins with is told next, by `trimmed`.
        known = [(table.allocator, block) for block in blocks]
        if table.ring is None:
            prefix = self._prefix_of.get(known[-1])
            self._adopting[table] = None if prefix is None else str(prefix)
        else:
            self._adopting[table] = " ".join([str(self._out_of_window[each]) for each in known])

    def looked_up(self, num_tokens: int, found: int) -> None:
        """See `Events`."""
        self._file.line("l", self._pool, num_tokens, found)

    def let_go(self, allocator: BlockAllocator, block: int) -> None:
        """See `Events`."""
        if (allocator, block) in self._out_of_window:
            self._file.line("u", self._out_of_window.pop((allocator, block)))
        self._fresh.pop((allocator, block), None)
        prefix = self._prefix_of.pop((allocator, block), None)
        if prefix is not None:
            self._file.line("e", prefix, 1)

    def moved(self, allocator: BlockAllocator, moves: Mapping[int, int]) -> None:
        """See `Events`."""
        _move(self._prefix_of, allocator, moves)
        _move(self._out_of_window, allocator, moves)
        _move(self._fresh, allocator, moves)

    def _number(self, table: BlockTable) -> int:
        self._tables[table] = next(self._file.numbers["table"])
        return self._tables[table]

    def _settled(self, table: BlockTable) -> int:
        """The table's number; its small writes so far are on file."""
        number = self._tables[table]
        if table in self._joined:
            self._file.line("w", number, *self._joined.pop(table), 0)
        return number


def _move(
    known: dict[tuple[BlockAllocator, int], Known],
    allocator: BlockAllocator,
    moves: Mapping[int, int],
) -> None:
    """Let what is known of blocks follow their pages."""
    found = [(target, (allocator, source)) for source, target in moves.items()]
    moved = {(allocator, target): known.pop(key) for target, key in found if key in known}
    known.update(moved)
