"""Files that commands write are checked before the work, and the check leaves them as they are."""

from pathlib import Path

from paged_kv.commands.arguments import require_writable


def test_a_file_stays_as_it_is(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("mine")
    require_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "mine"
