"""A server of entries, in this process."""

from collections.abc import Sequence

from paged_kv.store.entry_file import Buffer
from paged_kv.tiers.blobs import RemoteFault


class Memory:
    """Entries in memory, as `Blobs`.

    Attributes:
        calls: the kinds of calls so far, and of how many names.
        is_full: whether it takes nothing more.
    """

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.is_full = False

    def sizes(self, names: Sequence[str]) -> list[int]:
        self.calls.append(("sizes", len(names)))
        return [len(self.entries.get(name, b"")) for name in names]

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        self.calls.append(("get", len(wanted)))
        return [self.entries[name][:nbytes] for name, nbytes in wanted]

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        self.calls.append(("put", 1))
        if self.is_full:
            raise RemoteFault(MemoryError(), is_full=True)
        self.entries[name] = b"".join(data)

    def interrupt(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There are no connections."""
