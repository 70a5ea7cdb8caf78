"""Looks after entries on servers: verify, gc and clear; and copies entries between tiers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_kv.store.entry_file import Entry, decode, file_name
from paged_kv.store.errors import InvalidEntry, OtherEntry
from paged_kv.store.maintenance import Transfer, shown
from paged_kv.store.page_store import Finding, Outcome, PageStore, file_of
from paged_kv.tiers.blobs import MOST_ENTRY_BYTES, Blobs
from paged_kv.tiers.remote_tier import WrongSize
from paged_kv.tiers.seal import HEADER_BYTES, Seal

Found = tuple[str, Entry, memoryview]
"""An entry's name in its tier, its content, and the bytes of its file."""


@dataclass(frozen=True)
class Server:
    """The entries on a server, and what verifies them. Every function may raise RemoteFault."""

    blobs: Blobs
    seal: Seal

    def entry(self, name: str, nbytes: int) -> tuple[Entry, memoryview]:
        """An entry, and the bytes of its file.

        Raises:
            InvalidEntry: it is damaged, or was not written with the secret.
        """
        if not HEADER_BYTES < nbytes <= MOST_ENTRY_BYTES:
            raise WrongSize(f"it has {nbytes:,} bytes")
        (data,) = self.blobs.get([(name, nbytes)])
        payload = self.seal.opened(name, data)
        entry = decode(payload, None)
        if self.seal.name(entry.place.key) != name:
            raise OtherEntry("it has the name of another entry")
        return entry, payload


def verify(server: Server) -> tuple[int, list[Finding]]:
    """Read every entry; returns how many there are, and what is wrong with some."""
    names = list(server.blobs.names())
    findings = []
    for name, nbytes in shown("verify", names):
        try:
            server.entry(name, nbytes)
        except InvalidEntry as error:
            findings.append(Finding(name, f"{error.kind}: {error}", nbytes, True))
    return len(names), findings


def gc(server: Server, max_bytes: int) -> list[Finding]:
    """Remove entries that cannot be used, and of the others the oldest above a cap, where the
    server tells their age; returns what was removed."""
    _, removed = verify(server)
    useless = {finding.name for finding in removed}
    kept = [each for each in server.blobs.names() if each[0] not in useless]
    excess = sum(nbytes for _, nbytes in kept) - max_bytes
    for name, nbytes in kept:
        if excess > 0:
            removed.append(Finding(name, "more than the cap allows", nbytes, True))
            excess -= nbytes
    server.blobs.remove([finding.name for finding in removed])
    return removed


def copy(source: PageStore | Server, target: PageStore | Server) -> Transfer:
    """Copy all sound entries that the target lacks. Servers take full blocks only."""
    done, nbytes = 0, 0
    skipped: dict[str, str] = {}
    entries = (
        _of_folder(source, skipped)
        if isinstance(source, PageStore)
        else _of_server(source, skipped)
    )
    for name, entry, data in shown("copy", entries):
        if isinstance(target, PageStore):
            (outcome,) = target.put_files([file_of(entry.place, [data])])
        else:
            outcome = _put(target, entry, data)
        if outcome is Outcome.STORED:
            done, nbytes = done + 1, nbytes + len(data)
        elif outcome is Outcome.NO_ROOM and isinstance(target, PageStore):
            skipped[name] = f"{outcome.value}: {target.lack}"
    return Transfer(done, nbytes, skipped)


def _put(target: Server, entry: Entry, data: memoryview) -> Outcome:
    name = target.seal.name(entry.place.key)
    if not entry.place.link.is_full or target.blobs.sizes([name]) != [0]:
        return Outcome.KNOWN
    target.blobs.put(name, target.seal.sealed(name, [data]))
    return Outcome.STORED


def _of_folder(store: PageStore, skipped: dict[str, str]) -> Iterator[Found]:
    for row in store.rows():
        name = file_name(row.key)
        try:
            data = memoryview(store.folder.read(name))
            yield name, decode(data, row.key), data
        except (OSError, InvalidEntry) as error:
            skipped[name] = str(error)


def _of_server(server: Server, skipped: dict[str, str]) -> Iterator[Found]:
    for name, nbytes in server.blobs.names():
        try:
            yield name, *server.entry(name, nbytes)
        except InvalidEntry as error:
            skipped[name] = str(error)
