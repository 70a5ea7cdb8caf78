"""Looks after entries in folders and on servers: verify, gc and clear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paged_kv.store import maintenance as folders
from paged_kv.store.entry_file import decode
from paged_kv.store.errors import InvalidEntry, OtherEntry
from paged_kv.store.page_store import Finding, PageStore
from paged_kv.tiers.address import parse_address
from paged_kv.tiers.blobs import MOST_ENTRY_BYTES, Blobs
from paged_kv.tiers.opening import open_blobs, read_seal
from paged_kv.tiers.remote_tier import WrongSize
from paged_kv.tiers.seal import HEADER_BYTES, Seal
from paged_kv.tiers.store_options import StoreOptions


@dataclass(frozen=True)
class Server:
    """The entries on a server, and what verifies them. Every function may raise RemoteFault."""

    blobs: Blobs
    seal: Seal

    def verify(self, name: str, nbytes: int) -> None:
        """Read an entry.

        Raises:
            InvalidEntry: it is damaged, or was not written with the secret.
        """
        if not HEADER_BYTES < nbytes <= MOST_ENTRY_BYTES:
            raise WrongSize(f"it has {nbytes:,} bytes")
        (data,) = self.blobs.get([(name, nbytes)])
        entry = decode(self.seal.opened(name, data), None)
        if self.seal.name(entry.place.key) != name:
            raise OtherEntry("it has the name of another entry")


Place = PageStore | Server


@contextmanager
def opened_server(place: str, options: StoreOptions) -> Iterator[Server]:
    """The server at an address, with the secret of the options.

    Raises:
        ValueError: there is no secret, or a package is missing.
        OSError: the server fails.
    """
    address = parse_address(place)
    assert not isinstance(address, Path), "the caller knows that this is a server"
    blobs = open_blobs(address)
    try:
        yield Server(blobs, read_seal(options))
    finally:
        blobs.close()


def verify(place: Place) -> tuple[int, list[Finding]]:
    """Read every entry; returns how many there are, and what is wrong with some."""
    if isinstance(place, PageStore):
        findings = folders.verify(place)
        return len(place.stored_keys()), findings
    names, findings = list(place.blobs.names()), []
    for name, nbytes in folders.shown("verify", names):
        try:
            place.verify(name, nbytes)
        except InvalidEntry as error:
            findings.append(Finding(name, f"{error.kind}: {error}", nbytes, True))
    return len(names), findings


def gc(place: Place, max_bytes: int) -> list[Finding]:
    """Remove entries that cannot be used, and of the others those above a cap: of a folder, whose
    cap is its own, the first in its order; of a server the oldest, if it tells their age. Returns
    what was removed."""
    if isinstance(place, PageStore):
        return folders.gc(place)
    _, removed = verify(place)
    useless = {finding.name for finding in removed}
    kept = [each for each in place.blobs.names() if each[0] not in useless]
    excess = sum(nbytes for _, nbytes in kept) - max_bytes
    for name, nbytes in kept:
        if excess > 0:
            removed.append(Finding(name, "more than the cap allows", nbytes, True))
            excess -= nbytes
    place.blobs.remove([finding.name for finding in removed])
    return removed


def clear(place: Place, *, dry_run: bool = False) -> list[int]:
    """Remove all entries, also those of other versions of this package; returns their bytes."""
    if isinstance(place, PageStore):
        return folders.clear(place, dry_run=dry_run)
    found = dict(place.blobs.names())
    if not dry_run:
        place.blobs.remove(list(found))
    return list(found.values())
