"""What a tier needs of a place that keeps entries: bytes under names. And what looks after entries
without a model: verify, gc and clear."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from tqdm import tqdm

from paged_kv.store.entry_file import (
    UNSEALED,
    Buffer,
    InvalidEntry,
    NewerVersion,
    OtherEntry,
    Sealing,
    WrongSize,
    decode,
)

Item = TypeVar("Item")

# Of Llama 70B a page of 256 tokens has 84 MB. What claims more is left alone.
MOST_ENTRY_BYTES = 512 << 20
_SECONDS_A_DAY = 86_400


class Outcome(Enum):
    """The result of storing an entry."""

    STORED = "stored"
    KNOWN = "known"
    NO_ROOM = "there is no room, and nothing that could go"
    BUDGET_SPENT = "the day's budget is spent"


@dataclass(frozen=True)
class Blob:
    """An entry as its place lists it. `used_ns` is when it was used last, in nanoseconds since
    1970, or 0 where the place does not know."""

    name: str
    nbytes: int
    used_ns: int = 0


@dataclass(frozen=True)
class Finding:
    """An entry or file, and what is wrong with it. If it is `removable`, `gc` removes it."""

    name: str
    problem: str
    nbytes: int
    removable: bool


@dataclass(frozen=True)
class Written:
    """Bytes written to a place.

    Attributes:
        day: the day that `today` counts, as days since 1970 in UTC.
        today: bytes of that day.
        in_all: bytes since the place was made, or of a server since this process began.
    """

    day: int = 0
    today: int = 0
    in_all: int = 0

    @property
    def bytes_today(self) -> int:
        return self.today if self.day == today() else 0

    def plus(self, nbytes: int) -> Written:
        """The counts after `nbytes` more."""
        return Written(today(), self.bytes_today + nbytes, self.in_all + nbytes)


def today() -> int:
    """The number of the present day, which begins at midnight, UTC."""
    return int(time.time() // _SECONDS_A_DAY)


class BlobStore(ABC):
    """Entries in a folder or on a server. Threads may share it.

    Every method may raise an OSError. Calls to a server end within the time-outs that its client
    was made with.

    Attributes:
        label: the kind of place, for statistics.
        name: names it in logs, without passwords.
        seal: names and verifies its entries.
        is_shared: whether other machines use it. Such a place notes uses and evicts by itself.
        patience_s: seconds that a prompt waits for its question, and for its entries besides what
            they take at 20 MB/s.
        flush_s: seconds that the end of a process waits until everything is written.
        queue_bytes: the most bytes that wait to be written.
        get_bytes: how much one call of `get` should bring.
        put_bytes: how much one call of `put` should take.
        written: the bytes written today and in all, as far as this process knows.
        lack: what the latest entry lacked that got no room, and what to change.
    """

    label: str
    name: str
    seal: Sealing = UNSEALED
    is_shared = True
    patience_s = 0.5
    flush_s = 10.0
    queue_bytes = 256 << 20
    get_bytes = 16 << 20
    put_bytes = 1
    written = Written()
    lack = ""

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int]:
        """The bytes of each entry, 0 where there is none. One round trip, or as long as one."""

    @abstractmethod
    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        """Of each name the first so many bytes of the entry; fewer if it has become shorter, and
        none if it is gone. One round trip, or as long as one, if they are not many megabytes."""

    @abstractmethod
    def put(
        self, entries: Sequence[tuple[str, Sequence[Buffer]]], keep: Collection[str] = ()
    ) -> list[Outcome]:
        """Write entries, each as a whole or not at all; returns an outcome for each. To make room,
        none of the names `keep` is evicted."""

    @abstractmethod
    def entries(self) -> Iterator[Blob]:
        """All entries of this package, the least recently used first, or as far as the place knows
        their age the oldest."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove entries; those that are not there are ignored."""

    def refusal(self, nbytes: int) -> Outcome | None:
        """Why it would not take so many bytes now; None if it may."""
        return None

    def touch(self, names: Sequence[str]) -> None:
        """Record entries as used now, the first of them most recently, if the place does not note
        that by itself."""
        return

    def shrink(self, max_bytes: int) -> list[Blob]:
        """Remove the first of `entries` until the place takes at most `max_bytes`; returns them."""
        blobs = list(self.entries())
        gone = evicted(blobs, sum(blob.nbytes for blob in blobs) - max_bytes)
        self.remove([blob.name for blob in gone])
        return gone

    def oddities(self) -> list[Finding]:
        """What is there beside entries, or was and has been removed."""
        return []

    def saved_lookups(self) -> bytes:
        """What `save_lookups` was given, the latest last."""
        return b""

    def save_lookups(self, lookups: bytes) -> None:
        """Let counts of look-ups outlive the process, if the place can."""
        return

    def interrupt(self) -> None:
        """Let calls that run now fail, where the client can. Connections that are being made are
        kept, as the next call needs one too."""
        return

    def close(self) -> None:
        """Close all connections and files."""
        return


class RemoteFault(OSError):
    """A call to a server has failed; `is_full` where it had no memory left. It names the kind of
    error alone: texts of errors may hold passwords, keys or addresses."""

    def __init__(self, error: BaseException, *, is_full: bool = False) -> None:
        self.kind = type(error).__name__
        super().__init__(f"a call to the server failed with {self.kind}")
        self.is_full = is_full


def evicted(blobs: Iterable[Blob], excess: int, keep: Collection[str] = ()) -> list[Blob]:
    """The first entries without those in `keep` that take `excess` bytes, or all if they are
    fewer."""
    gone = []
    for blob in blobs:
        if excess <= 0:
            break
        if blob.name not in keep:
            gone.append(blob)
            excess -= blob.nbytes
    return gone


def round_trips(
    items: Iterable[Item], nbytes_of: Callable[[Item], int], most_bytes: int, most: int = 1 << 20
) -> list[list[Item]]:
    """Items by round trip, in order: at most so many bytes and items each, or one larger item."""
    found: list[list[Item]] = []
    nbytes = 0
    for item in items:
        nbytes += nbytes_of(item)
        if not found or nbytes > most_bytes or len(found[-1]) == most:
            found.append([])
            nbytes = nbytes_of(item)
        found[-1].append(item)
    return found


def verify(blobs: BlobStore) -> tuple[int, list[Finding]]:
    """Read every entry; returns how many there are, and what is wrong with what is there. What is
    useless goes at once from a folder, as with every writer; the findings name it.

    Writers may run meanwhile: an entry that disappears before its turn was evicted.
    """
    findings = blobs.oddities()
    found = list(blobs.entries())
    for blob in tqdm(found, "verify", unit=" entries", leave=False, disable=None):
        try:
            _verify(blobs, blob)
        except InvalidEntry as error:
            problem, is_useless = f"{error.kind}: {error}", error.kind != NewerVersion.kind
            findings.append(Finding(blob.name, problem, blob.nbytes, is_useless))
        except RemoteFault:
            raise
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
            findings.append(Finding(blob.name, problem, blob.nbytes, False))
    return len(found), sorted(findings, key=lambda finding: finding.name)


def gc(blobs: BlobStore, max_bytes: int) -> list[Finding]:
    """Remove what cannot be used, and of the rest what exceeds a cap, the least recently used
    first; returns what was removed."""
    removed = [finding for finding in verify(blobs)[1] if finding.removable]
    blobs.remove([finding.name for finding in removed])
    over = blobs.shrink(max_bytes)
    excess = [Finding(blob.name, "more than the cap allows", blob.nbytes, True) for blob in over]
    return removed + excess


def clear(blobs: BlobStore, *, dry_run: bool = False) -> list[int]:
    """Remove all entries, also those of other versions of this package; returns their bytes."""
    found = list(blobs.entries())
    if not dry_run:
        blobs.remove([blob.name for blob in found])
    return [blob.nbytes for blob in found]


def _verify(blobs: BlobStore, blob: Blob) -> None:
    (nbytes,) = blobs.sizes([blob.name])
    if not nbytes:
        return
    if not blobs.seal.header_bytes < nbytes <= MOST_ENTRY_BYTES:
        raise WrongSize(f"it has {nbytes:,} bytes")
    (data,) = blobs.get([(blob.name, nbytes)])
    entry = decode(blobs.seal.opened(blob.name, data), None)
    if blobs.seal.name(entry.place.key) != blob.name:
        raise OtherEntry(f"it holds entry {entry.place.key}")
