"""Verifies, cleans and clears a store; needs no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from paged_kv.store.entry_file import SUFFIX, decode, file_name
from paged_kv.store.errors import InvalidEntry
from paged_kv.store.folder import is_page_file
from paged_kv.store.limits import victims
from paged_kv.store.page_store import Finding, PageStore

T = TypeVar("T")


def verify(store: PageStore) -> list[Finding]:
    """Read every file and return the faults. Like every writer, this removes useless files; the
    findings name them.

    Writers may run meanwhile: a file that disappears before its turn was evicted.
    """
    with store.exclusive() as contents:
        pass
    findings = [
        Finding(name, "not a file of the store; it counts against the cap", size, False)
        for name, size in contents.others.items()
    ]
    files = shown("verify", contents.files.items())
    looked_at = [_look_at(store, key, size) for key, size in files]
    findings += [finding for finding in looked_at if finding is not None]
    return sorted([*store.discarded, *findings], key=lambda finding: finding.name)


def gc(store: PageStore) -> list[Finding]:
    """Remove damaged files, files of dead writers, and entries over the cap; returns them."""
    findings = [finding for finding in verify(store) if finding.removable]
    store.discard(
        [finding.name.removesuffix(SUFFIX) for finding in findings if is_page_file(finding.name)]
    )
    return findings + _enforce_cap(store)


def clear(store: PageStore, *, dry_run: bool = False) -> list[int]:
    """Remove all entries, also those of other versions; returns the bytes of their files."""
    with store.exclusive() as contents:
        files = contents.files
    if not dry_run:
        store.discard(list(files))
    return list(files.values())


def shown(work: str, entries: Iterable[T], total: int | None = None) -> Iterator[T]:
    """The entries, with a progress bar if standard error is a terminal."""
    return iter(tqdm(entries, work, total, unit=" entries", leave=False, disable=None))


def _look_at(store: PageStore, key: str, nbytes: int) -> Finding | None:
    """The fault of a file; None if it is sound."""
    name = file_name(key)
    try:
        decode(store.folder.read(name), key)
    except InvalidEntry as error:
        return Finding(name, f"{error.kind}: {error}", nbytes, error.kind != "other version")
    except FileNotFoundError:
        return None
    except OSError as error:
        return Finding(name, f"cannot be read: {error.strerror}", nbytes, False)
    return None


def _enforce_cap(store: PageStore) -> list[Finding]:
    """Evict entries until the limits hold, or none are left."""
    with store.exclusive() as contents:
        excess = store.limits.excess(contents.used, store.folder.free_bytes(), 0)
        if excess <= 0:
            return []
        order = [(key, contents.files[key]) for key in store.eviction_order()]
        keys = victims(order, excess, ()) or [key for key, _ in order]
        store.discard(keys)
        return [
            Finding(file_name(key), "more than the cap allows", contents.files[key], True)
            for key in keys
        ]
