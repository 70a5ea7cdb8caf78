"""What a tier needs of a server: bytes under names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from paged_kv.store.entry_file import Buffer

# Of Llama 70B a page of 256 tokens has 84 MB. What claims more is left alone.
MOST_ENTRY_BYTES = 512 << 20


Item = TypeVar("Item")


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


class RemoteFault(OSError):
    """A call to a server has failed. It names the kind of error alone: texts of errors may hold
    passwords, keys or addresses.

    Attributes:
        kind: the name of the client's exception.
        is_full: whether the server had no memory left.
    """

    def __init__(self, error: BaseException, *, is_full: bool = False) -> None:
        self.kind = type(error).__name__
        super().__init__(f"a call to the server failed with {self.kind}")
        self.is_full = is_full


class Blobs(Protocol):
    """Entries on a server. Every method may raise RemoteFault, and ends within the time-outs that
    the client was made with. Threads may share it."""

    def sizes(self, names: Sequence[str]) -> list[int]:
        """The bytes of each entry, 0 where there is none. One round trip, or as long as one."""
        ...

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        """Of each name the first so many bytes of the entry; fewer if it has become shorter, and
        none if it is gone. One round trip, or as long as one, if they are not many megabytes."""
        ...

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        """Write an entry. It is there as a whole or not at all."""
        ...

    def names(self) -> Iterator[tuple[str, int]]:
        """The names of all entries of this package, and their bytes; the oldest first where the
        server knows their age."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove entries; those that are not there are ignored."""
        ...

    def interrupt(self) -> None:
        """Let calls that run now fail, where the client can. Connections that are being made are
        kept, as the next call needs one too."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...
