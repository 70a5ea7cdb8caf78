"""A server of entries, in this process."""

from collections.abc import Collection, Iterator, Sequence

from paged_kv.store.blob_store import Blob, BlobStore, Outcome, RemoteFault
from paged_kv.store.entry_file import Buffer, Seal
from tests.support.tier_servers import SECRET


class Memory(BlobStore):
    """Entries in memory.

    Attributes:
        calls: the kinds of calls so far, and of how many names.
        is_full: whether it takes nothing more.
    """

    label = name = "there"
    seal = Seal(SECRET)

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.is_full = False

    def sizes(self, names: Sequence[str]) -> list[int]:
        self.calls.append(("sizes", len(names)))
        return [len(self.blobs.get(name, b"")) for name in names]

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        self.calls.append(("get", len(wanted)))
        return [self.blobs[name][:nbytes] for name, nbytes in wanted]

    def put(
        self, entries: Sequence[tuple[str, Sequence[Buffer]]], keep: Collection[str] = ()
    ) -> list[Outcome]:
        self.calls.append(("put", len(entries)))
        if self.is_full:
            raise RemoteFault(MemoryError(), is_full=True)
        self.blobs |= {name: b"".join(data) for name, data in entries}
        return [Outcome.STORED] * len(entries)

    def entries(self) -> Iterator[Blob]:
        yield from [Blob(name, len(data)) for name, data in self.blobs.items()]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.blobs.pop(name, None)
