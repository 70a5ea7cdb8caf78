"""Files that commands write are checked before the work, and the check leaves them as they are."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from paged_kv.commands.output_files import removed_unless_complete, require_writable


def test_a_file_stays_as_it_is(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("mine")
    require_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "mine"


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """Its reader would take the end of the check for the end of the file."""
    os.mkfifo(tmp_path / "pipe")
    checked = threading.Thread(target=require_writable, args=[tmp_path / "pipe"], daemon=True)
    checked.start()
    checked.join(60)  # It would wait for a reader.
    assert not checked.is_alive()


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        require_writable(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .* for out"):
        require_writable(tmp_path / "none" / "out")

    # No permission stops root, as whom containers run tests.
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError, match=r"cannot be written \(Permission denied\): name"):
        require_writable(tmp_path / "out")


def test_only_a_new_file_is_removed_that_is_not_complete(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.touch()
    for file in (new, old):
        with suppress(ZeroDivisionError), removed_unless_complete(file):
            file.write_text("half")
            1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == [old]
    with removed_unless_complete(new):
        new.write_text("whole")
    assert new.read_text() == "whole"
