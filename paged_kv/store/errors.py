"""The exceptions of the page store. Callers see only the first, when they open a store.

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
    """The StoreError for a folder that cannot be used because of `error`."""
    return StoreError(
        f"{path} cannot be used as a page store ({error}): choose another folder, or free disk "
        "space and allow writing there"
    )


class InvalidEntry(ValueError):
    """A file is not a readable entry: it is damaged, cut off, or of another kind."""

    kind = "damaged"


class NewerVersion(InvalidEntry):
    """An entry in a format that this version does not read."""

    kind = "other version"


class OtherEntry(InvalidEntry):
    """A sound entry, but not the one that was asked for."""

    kind = "other entry"
