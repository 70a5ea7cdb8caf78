"""Looks after the entries of a tier: verify, gc and clear. It needs no model."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from paged_kv.store.blob_store import Blob, BlobStore, Finding, RemoteFault
from paged_kv.store.entry_file import InvalidEntry, NewerVersion, OtherEntry, WrongSize, decode
from paged_kv.store.folder import TAG
from paged_kv.store.folder_store import FolderStore
from paged_kv.store.options import StoreOptions, parse_address
from paged_kv.store.tier import MOST_ENTRY_BYTES
from paged_kv.store.tiered_store import open_blobs, read_seal


def opened_place(place: str | Path, max_bytes: int, options: StoreOptions) -> BlobStore:
    """A folder, or the server at an address with the secret of the options. The caller closes it.

    Raises:
        ValueError: a server lacks a secret, or a package is missing.
        OSError: there is no store in the folder, or the server fails.
    """
    if isinstance(place, Path):
        if not (place / TAG).exists():
            raise FileNotFoundError(
                f"there is no page store in {place}: name with --store the folder that the store "
                "was made in"
            )
        # Listing and cleaning up need no free disk space.
        return FolderStore(place, max_bytes, min_free_bytes=0)
    return open_blobs(parse_address(place), read_seal(options))


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
    """Read an entry.

    Raises:
        InvalidEntry: it is damaged, or was not written with the secret.
    """
    (nbytes,) = blobs.sizes([blob.name])
    if not nbytes:
        return
    if not blobs.seal.header_bytes < nbytes <= MOST_ENTRY_BYTES:
        raise WrongSize(f"it has {nbytes:,} bytes")
    (data,) = blobs.get([(blob.name, nbytes)])
    entry = decode(blobs.seal.opened(blob.name, data), None)
    if blobs.seal.name(entry.place.key) != blob.name:
        raise OtherEntry(f"it holds entry {entry.place.key}")
