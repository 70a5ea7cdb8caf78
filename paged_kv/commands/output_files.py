"""Checks the files that commands write before the work begins, and leaves none half-written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_kv.commands.interrupts import raised


def require_writable(file: Path) -> None:
    """Check that a file can be written, and leave it as it is.

    Raises:
        FileNotFoundError: its folder is not there.
        OSError: it is a folder, or may not be written.
    """
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for {file.name}: make it first")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a file to write")
    is_new = not file.exists()
    if not is_new and not file.is_file():
        return  # To open and close a pipe would end it for its reader.
    try:
        file.open("ab").close()
    except OSError as error:
        raise type(error)(
            f"{file} cannot be written ({error.strerror}): name a file that can"
        ) from None
    if is_new:
        file.unlink()


@contextmanager
def removed_unless_complete(file: Path) -> Iterator[None]:
    """Remove a new file if what writes it fails or is interrupted."""
    is_new = not file.exists()
    with raised():
        try:
            yield
        except BaseException:
            if is_new:
                file.unlink(missing_ok=True)
            raise
