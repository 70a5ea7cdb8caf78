"""The page store: entries are found again, the cap holds, and processes may come and go."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paged_kv.store import index
from paged_kv.store.background import BackgroundStore
from paged_kv.store.entry_file import file_name
from paged_kv.store.errors import NewerVersion
from paged_kv.store.folder import TAG
from paged_kv.store.index import FILES, NAME
from paged_kv.store.keys import EntryPlace, Link
from paged_kv.store.limits import LEDGER
from paged_kv.store.lookup import CHECKPOINT
from paged_kv.store.page_store import MIN_BYTES, Outcome, PageStore
from tests.support.folders import ROOT
from tests.support.store_entries import PAGES, bytes_in, entry, is_right, links, open_store, prompt

LARGE = 100_000  # In words: about 20 files fill the smallest store.


def put(store: PageStore, chain: list[Link], words: int = 1000) -> list[Outcome]:
    return store.put([entry(link, words=words) for link in chain])


def test_what_is_stored_is_found_by_the_next_process(tmp_path: Path) -> None:
    chain = links(prompt(0, 700))
    with open_store(tmp_path / "a" / "store") as store:
        assert put(store, chain) == [Outcome.STORED] * 3
        assert put(store, chain[:1]) == [Outcome.KNOWN]
    with open_store(tmp_path / "a" / "store") as store:
        assert all(is_right(store.get(EntryPlace(link, PAGES))) for link in chain)
        with pytest.raises(FileNotFoundError):
            store.get(EntryPlace(chain[0], CHECKPOINT))


def test_only_the_owner_can_look_and_names_say_nothing(tmp_path: Path) -> None:
    """Also in a folder that was open to others."""
    (tmp_path / "store").mkdir(0o755)
    with open_store(tmp_path / "store") as store:
        put(store, links(prompt(0)))
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "store").iterdir():
        assert path.stat().st_mode & 0o077 == 0 or path.name in FILES
    names = {path.name for path in (tmp_path / "store").iterdir()} - set(FILES)
    assert names == {*(file_name(EntryPlace(links(prompt(0))[0], PAGES).key), TAG, "lock", LEDGER)}
    text = (tmp_path / "store" / TAG).read_text()
    assert text.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


def test_a_lower_cap_holds_from_the_start(tmp_path: Path) -> None:
    chain = links(prompt(1, 256 * 25))
    with open_store(tmp_path / "store") as store:
        put(store, chain, LARGE)
    # Commands that list a folder evict nothing.
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        assert len(store.stored_keys()) == 25
    opened = BackgroundStore(open_store(tmp_path / "store", MIN_BYTES))
    assert 10 < len(opened.store.stored_keys()) < 25
    assert bytes_in(tmp_path / "store") <= MIN_BYTES
    opened.close()


def test_beginnings_outlive_what_comes_behind_them(tmp_path: Path) -> None:
    first, second = links(prompt(1, 256 * 10)), links(prompt(2, 256 * 12))
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        put(store, first, LARGE)
        put(store, second, LARGE)
        kept = [link for link in first if EntryPlace(link, PAGES).key in store.stored_keys()]
        assert 0 < len(kept) < len(first)
        assert kept == first[: len(kept)]


def test_a_prompt_that_comes_in_parts_does_not_push_out_its_beginning(tmp_path: Path) -> None:
    chain = links(prompt(1, 256 * 40))
    keys = [EntryPlace(link, PAGES).key for link in chain]
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        for start in range(0, 40, 5):
            part = [entry(link, words=LARGE) for link in chain[start : start + 5]]
            store.put(part, keep=keys)
        kept = store.stored_keys()
        assert 10 < len(kept) < 40
        assert kept == set(keys[: len(kept)])


def test_rows_that_the_index_is_about_to_get_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of one call get their rows in the end, and the cap must hold then."""
    chain = links(prompt(1, 256 * 20))
    keys = [EntryPlace(link, PAGES).key for link in chain]
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        monkeypatch.setattr(index, "ROW_BYTES", MIN_BYTES // 10)
        outcomes = store.put([entry(link, words=4) for link in chain], keep=keys)
    assert 0 < outcomes.count(Outcome.STORED) < 10
    assert outcomes[-1] is Outcome.NO_ROOM


def test_foreign_files_count_and_stay(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        put(store, [links(prompt(seed))[0] for seed in range(8)], LARGE)
        (tmp_path / "store" / "notes").mkdir()
        (tmp_path / "store" / "notes" / "film.mp4").write_bytes(bytes(5 << 20))
        put(store, [links(prompt(seed))[0] for seed in range(8, 20)], LARGE)
        assert bytes_in(tmp_path / "store") <= MIN_BYTES
        assert 0 < len(store.stored_keys()) < 8
        (tmp_path / "store" / "film.mp4").write_bytes(bytes(3 << 20))
        assert put(store, links(prompt(30)), LARGE) == [Outcome.NO_ROOM]
        assert "of at most 8.39 MB" in store.lack
    assert (tmp_path / "store" / "notes" / "film.mp4").exists()


def test_the_disk_keeps_what_it_must_have_free(tmp_path: Path, monkeypatch: Any) -> None:
    with open_store(tmp_path / "store", min_free_bytes=1 << 30) as store:
        put(store, [links(prompt(seed))[0] for seed in range(8)], LARGE)
        monkeypatch.setattr(store.folder, "free_bytes", lambda: (1 << 30) + (1 << 20))
        put(store, links(prompt(8)), LARGE)
        assert len(store.stored_keys()) < 8
        monkeypatch.setattr(store.folder, "free_bytes", lambda: 1 << 20)
        before = store.stored_keys()
        # Evicting everything that may go would not be enough, so nothing is evicted.
        assert put(store, links(prompt(9)), LARGE) == [Outcome.NO_ROOM]
        assert "the disk has 1.05 MB free" in store.lack
        assert store.stored_keys() == before


def test_a_newer_version_is_skipped_and_kept(tmp_path: Path) -> None:
    folder, chain = tmp_path / "store", links(prompt(0))
    key = EntryPlace(chain[0], PAGES).key
    with open_store(folder) as store:
        put(store, chain)
        data = (folder / file_name(key)).read_bytes()
        (folder / file_name(key)).write_bytes(data.replace(b'"version":"1"', b'"version":"9"'))
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    with open_store(folder) as store:
        assert store.stored_keys() == set()
        with pytest.raises(NewerVersion):
            store.get(EntryPlace(chain[0], PAGES))
    assert (folder / file_name(key)).exists()


def test_pages_that_other_tools_have_copied_are_found(tmp_path: Path) -> None:
    (link,) = links(prompt(0))
    with open_store(tmp_path / "store") as store, open_store(tmp_path / "other") as other:
        put(store, [link])
        shutil.copy(next((tmp_path / "store").glob("*.safetensors")), tmp_path / "other")
        put(other, links(prompt(1)))
        assert EntryPlace(link, PAGES).key in other.stored_keys()


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    folder, chain = tmp_path / "store", links(prompt(0, 512))
    with open_store(folder) as store, open_store(tmp_path / "other") as other:
        put(other, chain)
        names = [file_name(EntryPlace(link, PAGES).key) for link in chain]
        (folder / names[0]).symlink_to(tmp_path / "other" / names[0])
        os.mkfifo(folder / names[1])
        for link in chain:
            with pytest.raises(OSError, match=r"levels of symbolic|no regular"):
                store.get(EntryPlace(link, PAGES))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / TAG).touch()
    (tmp_path / "linked" / NAME).symlink_to(tmp_path / "elsewhere.sqlite3")
    open_store(tmp_path / "linked").close()
    assert not (tmp_path / "elsewhere.sqlite3").exists()


WRITER = """
import sys
from pathlib import Path
from tests.support.store_entries import bytes_in, entry, links, open_store, prompt
from paged_kv.store.page_store import MIN_BYTES
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
with open_store(folder, MIN_BYTES, patience_s=240) as store:
    for at in range(60):
        store.put([entry(link, words=30_000) for link in links(prompt(1000 * seed + at, 600))])
        assert bytes_in(folder) <= MIN_BYTES or bytes_in(folder) <= MIN_BYTES
assert not any(name.partition(".")[0] in ("mlx", "mlx_lm") for name in sys.modules)
"""


@pytest.mark.slow
def test_two_processes_share_a_folder_under_one_cap(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(seed)], env=environment)
        for seed in (1, 2)
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert bytes_in(folder) <= MIN_BYTES
    with open_store(folder, MIN_BYTES) as store:
        keys = store.stored_keys()
        assert len(keys) > 50
        with store.exclusive() as contents:
            assert contents.files.keys() == keys
        assert store.discarded == []
