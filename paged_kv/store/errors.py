"""The exceptions of the page store. Only the first leaves it, when a store is opened.

StoreError(PagedKVError)
InvalidEntry(ValueError)
├── NewerVersion    written by another version of this package
└── OtherEntry      a sound file that is not what was asked for
"""

from pathlib import Path

from paged_kv.allocator.errors import PagedKVError


class StoreError(PagedKVError):
    """A folder cannot be used as a page store; the message names it and says what to change."""


def unusable(path: Path, error: Exception) -> StoreError:
    """What to raise when a folder cannot be opened for that reason."""
    return StoreError(
        f"{path} cannot be used as a page store ({error}): choose another folder, or make room and "
        "allow writing there"
    )


class InvalidEntry(ValueError):
    """A file is no entry: it is damaged, cut off, or something else altogether."""

    kind = "damaged"


class NewerVersion(InvalidEntry):
    """An entry in a format that this version does not read."""

    kind = "other version"


class OtherEntry(InvalidEntry):
    """A sound entry, and not the one that was asked for."""

    kind = "other entry"
