"""A finding of `verify` or `gc`: a file in a store that is faulty or should not be there."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A file, and what is wrong with it.

    Attributes:
        name: of the file.
        problem: what is wrong with it.
        nbytes: bytes that it takes on disk.
        removable: whether `gc` removes it, if it still exists.
    """

    name: str
    problem: str
    nbytes: int
    removable: bool
