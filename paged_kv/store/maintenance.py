"""Verifies, cleans, clears, exports and imports a store; needs no model.

An export is a tar file of the page files. An import verifies each file as a read does, and keeps to
the cap as a write does. It cannot verify the numbers in pages: import only files from somebody you
trust.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from paged_kv.store.entry_file import SUFFIX, Entry, decode, file_name
from paged_kv.store.errors import InvalidEntry
from paged_kv.store.folder import is_page_file
from paged_kv.store.limits import victims
from paged_kv.store.page_store import File, Finding, Outcome, PageStore, file_of

T = TypeVar("T")

Found = tuple[str, Entry, memoryview]
"""An entry's name in its tier, its content, and the bytes of its file."""


@dataclass(frozen=True)
class Transfer:
    """The result of an export or import.

    Attributes:
        entries: how many were written, without those that existed already.
        nbytes: of their files.
        skipped: names that were not written, and why.
    """

    entries: int
    nbytes: int
    skipped: dict[str, str]


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


def sound_entries(store: PageStore, skipped: dict[str, str]) -> Iterator[Found]:
    """The entries, the most recently used first; notes the others, and why, in `skipped`."""
    for row in store.rows():
        name = file_name(row.key)
        try:
            data = memoryview(store.folder.read(name))
            yield name, decode(data, row.key), data
        except (OSError, InvalidEntry) as error:
            skipped[name] = str(error)


def export(store: PageStore, path: Path) -> Transfer:
    """Write all sound entries into a new tar file.

    Raises:
        FileExistsError: the file exists.
    """
    done, nbytes = 0, 0
    skipped: dict[str, str] = {}
    with tarfile.open(path, "x") as archive:
        for name, _, data in shown("export", sound_entries(store, skipped), len(store.rows())):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
            done, nbytes = done + 1, nbytes + len(data)
    return Transfer(done, nbytes, skipped)


def import_(store: PageStore, path: Path) -> Transfer:
    """Add the entries of an export to a store as its most recently used, in the export's order of
    use. An export lists the most recently used entries first; they stay if the cap does not hold
    all.

    Raises:
        OSError: the file cannot be read, or the folder cannot be written.
        ValueError: the file is not a tar file.
    """
    done, nbytes = 0, 0
    skipped: dict[str, str] = {}
    kept: list[str] = []
    try:
        with tarfile.open(path) as archive:
            for known, data in shown("import", _imported(archive, skipped)):
                row, _ = known
                kept.append(row.key)
                (outcome,) = store.put_files([(known, data)], kept)
                if outcome is Outcome.NO_ROOM:
                    skipped[file_name(row.key)] = f"{outcome.value}: {store.lack}"
                elif outcome is Outcome.STORED:
                    done, nbytes = done + 1, nbytes + row.nbytes
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not an export of a page store: {error}") from None
    # Restore the export's order: each entry was the most recently used when it was added.
    store.touch(kept)
    return Transfer(done, nbytes, skipped)


def _imported(archive: tarfile.TarFile, skipped: dict[str, str]) -> Iterator[File]:
    """The sound entries of an archive."""
    for member in archive:
        content = archive.extractfile(member) if member.isreg() else None
        if content is None or not is_page_file(member.name):
            skipped[member.name] = "not a page file"
            continue
        data = content.read()
        try:
            entry = decode(data, member.name.removesuffix(SUFFIX))
        except InvalidEntry as error:
            skipped[member.name] = str(error)
            continue
        yield file_of(entry.place, [data])


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
