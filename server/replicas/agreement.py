"""Sees to it that all replicas compute the same."""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

# Of each file, so many pieces, spread over it. Other weights differ nearly everywhere, and a large
# model takes minutes to read.
PIECES, PIECE_BYTES = 64, 4096


class Agreement:
    """Knows what the first replica computes with. Ray Serve runs one beside the replicas."""

    def __init__(self) -> None:
        self._first: tuple[str, dict[str, str]] | None = None

    def require_same(self, place: str, identity: dict[str, str]) -> None:
        """Compare a replica with the first one.

        Args:
            place: names the replica.
            identity: see `identity_of`.

        Raises:
            ValueError: they differ.
        """
        if self._first is None:
            self._first = place, identity
        first, expected = self._first
        for name, value in identity.items():
            if value != expected[name]:
                raise ValueError(
                    f"replica {place} has {name} {value}, and replica {first}, with which it is to "
                    f"answer as one, has {expected[name]}: install the same on all machines, and "
                    "give them the same files"
                )


def identity_of(folder: Path | None) -> dict[str, str]:
    """What decides the answers of a replica, beside its options: versions, and the model's files.

    Args:
        folder: of the model; None if requests name one.
    """
    named = {package: version(package) for package in ("paged-kv", "mlx", "mlx-lm")}
    return named if folder is None else named | {"model": _digest(folder)}


def _digest(folder: Path) -> str:
    """A hash of the names, sizes and pieces of a model's files."""
    digest = sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as content:
                for number in range(PIECES):
                    content.seek(number * max(0, size - PIECE_BYTES) // (PIECES - 1))
                    digest.update(content.read(PIECE_BYTES))
    return digest.hexdigest()[:16]
