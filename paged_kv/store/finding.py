"""Something in a store that should not be there, or not be so."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A file, and what is wrong with it.

    Attributes:
        name: of the file.
        problem: what is wrong.
        nbytes: that it takes of the disk.
        removable: whether `gc` removes it, if it is not gone already.
    """

    name: str
    problem: str
    nbytes: int
    removable: bool
