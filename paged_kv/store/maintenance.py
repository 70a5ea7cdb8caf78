"""What one does with a store that no model uses: look for faults, tidy up, empty it, and carry
entries to another one.

An export is a tar file of page files, as they are. What is imported is verified like what is read,
and put under the cap like what is computed. Its numbers cannot be verified: import only what comes
from somebody you trust.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paged_kv.store.entry_file import SUFFIX, decode, file_name
from paged_kv.store.errors import InvalidEntry
from paged_kv.store.eviction import least_recently_used
from paged_kv.store.finding import Finding
from paged_kv.store.folder import is_page_file
from paged_kv.store.page_store import File, Outcome, PageStore, file_of


@dataclass(frozen=True)
class Transfer:
    """What an export or import did.

    Attributes:
        entries: that were written; those that were there already are not.
        nbytes: of their files.
        skipped: names that were not, and why.
    """

    entries: int
    nbytes: int
    skipped: dict[str, str]


def verify(store: PageStore) -> list[Finding]:
    """Read every file; returns what is wrong. That changes nothing but what every writer does:
    what is no use to anybody is removed, and named here.

    Writers go on meanwhile: a file that is gone when its turn comes was evicted.
    """
    with store.exclusive() as contents:
        pass
    findings = [
        Finding(name, "not a file of the store; it counts against the cap", size, False)
        for name, size in contents.others.items()
    ]
    looked_at = [_look_at(store, key, size) for key, size in contents.files.items()]
    findings += [finding for finding in looked_at if finding is not None]
    return sorted([*store.discarded, *findings], key=lambda finding: finding.name)


def gc(store: PageStore) -> list[Finding]:
    """Remove what is damaged or left behind, and what is more than the cap allows; returns what
    was removed."""
    findings = [finding for finding in verify(store) if finding.removable]
    store.discard(
        [finding.name.removesuffix(SUFFIX) for finding in findings if is_page_file(finding.name)]
    )
    return findings + _enforce_cap(store)


def clear(store: PageStore, *, dry_run: bool = False) -> tuple[int, int]:
    """Remove all entries, also those of other versions; returns how many, and their bytes."""
    with store.exclusive() as contents:
        files = contents.files
    if not dry_run:
        store.discard(list(files))
    return len(files), sum(files.values())


def export(store: PageStore, path: Path) -> Transfer:
    """Write all sound entries into a tar file that is not there yet.

    Raises:
        FileExistsError: it is.
    """
    done, nbytes, skipped = 0, 0, {}
    with tarfile.open(path, "x") as archive:
        for row in store.rows():
            name = file_name(row.key)
            try:
                data = store.folder.read(name)
                decode(data, row.key)
            except (OSError, InvalidEntry) as error:
                skipped[name] = str(error)
                continue
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
            done, nbytes = done + 1, nbytes + len(data)
    return Transfer(done, nbytes, skipped)


def import_(store: PageStore, path: Path) -> Transfer:
    """Put the entries of an export into a store, as used later than all others there and in the
    order of their use in the export. The latest used come first in an export, and are the last to
    go where the cap does not hold all.

    Raises:
        OSError: the file cannot be read, or the folder not be written.
        ValueError: it is no tar file.
    """
    done, nbytes = 0, 0
    skipped: dict[str, str] = {}
    kept: list[str] = []
    try:
        with tarfile.open(path) as archive:
            for known, data in _imported(archive, skipped):
                row, _ = known
                kept.append(row.key)
                (outcome,) = store.put_files([(known, data)], kept)
                if outcome is Outcome.NO_ROOM:
                    skipped[file_name(row.key)] = outcome.value
                elif outcome is Outcome.STORED:
                    done, nbytes = done + 1, nbytes + row.nbytes
    except tarfile.TarError as error:
        raise ValueError(f"{path} is no export of a page store: {error}") from None
    # Each of them was the latest used when it was put there.
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


def _look_at(store: PageStore, key: str, nbytes: int) -> Finding | None:
    """What is wrong with a file, if anything is."""
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
    """Remove entries until the limits hold, as far as that can be."""
    with store.exclusive() as contents:
        excess = store.limits.excess(contents.used, store.folder.free_bytes(), 0)
        if excess <= 0:
            return []
        by_use = [(row.key, contents.files[row.key]) for row in reversed(store.rows())]
        keys = least_recently_used(by_use, excess, ()) or [key for key, _ in by_use]
        store.discard(keys)
        return [
            Finding(file_name(key), "more than the cap allows", contents.files[key], True)
            for key in keys
        ]
