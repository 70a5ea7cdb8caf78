"""The store in a folder: entries are found again, the cap holds, and processes may come and go."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paged_kv.store.blob_store import Outcome
from paged_kv.store.entry_file import SUFFIX
from paged_kv.store.folder_store import LEDGER, TAG, FolderStore
from paged_kv.store.keys import CHECKPOINT, EntryPlace, Link
from paged_kv.store.options import MIN_BYTES
from paged_kv.store.tiered_store import folder_tier
from tests.support.folders import ROOT
from tests.support.store_entries import (
    PAGES,
    bytes_in,
    entry,
    is_right,
    links,
    open_store,
    prompt,
    put,
    stored_entry,
    stored_keys,
)

LARGE = 100_000  # In words: about 20 files fill the smallest store.


def put_links(store: FolderStore, chain: list[Link], words: int = 1000) -> list[Outcome]:
    return put(store, [entry(link, words=words) for link in chain])


def file_of(link: Link) -> str:
    return EntryPlace(link, PAGES).key + SUFFIX


def test_what_is_stored_is_found_by_the_next_process(tmp_path: Path) -> None:
    chain = links(prompt(0, 700))
    with open_store(tmp_path / "a" / "store") as store:
        assert put_links(store, chain) == [Outcome.STORED] * 3
        assert put_links(store, chain[:1]) == [Outcome.KNOWN]
    with open_store(tmp_path / "a" / "store") as store:
        found = [stored_entry(store, EntryPlace(link, PAGES).key) for link in chain]
        assert all(each is not None and is_right(each) for each in found)
        assert stored_entry(store, EntryPlace(chain[0], CHECKPOINT).key) is None


def test_only_the_owner_can_look_and_names_say_nothing(tmp_path: Path) -> None:
    """Also in a folder that was open to others."""
    (tmp_path / "store").mkdir(0o755)
    with open_store(tmp_path / "store") as store:
        put_links(store, links(prompt(0)))
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "store").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert names == {file_of(links(prompt(0))[0]), TAG, "lock", LEDGER}
    text = (tmp_path / "store" / TAG).read_text()
    assert text.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


def test_a_lower_cap_holds_from_the_start(tmp_path: Path) -> None:
    chain = links(prompt(1, 256 * 25))
    with open_store(tmp_path / "store") as store:
        put_links(store, chain, LARGE)
    # Commands that list a folder evict nothing.
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        assert len(stored_keys(store)) == 25
    store = open_store(tmp_path / "store", MIN_BYTES)
    opened = folder_tier(store)
    assert 10 < len(stored_keys(store)) < 25
    assert bytes_in(tmp_path / "store") <= MIN_BYTES
    opened.close()


def test_beginnings_outlive_what_comes_behind_them(tmp_path: Path) -> None:
    first, second = links(prompt(1, 256 * 10)), links(prompt(2, 256 * 12))
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        put_links(store, first, LARGE)
        put_links(store, second, LARGE)
        kept = [link for link in first if EntryPlace(link, PAGES).key in stored_keys(store)]
        assert 0 < len(kept) < len(first)
        assert kept == first[: len(kept)]


def test_a_prompt_that_comes_in_parts_does_not_push_out_its_beginning(tmp_path: Path) -> None:
    chain = links(prompt(1, 256 * 40))
    entries = [entry(link, words=LARGE) for link in chain]
    keys = [each.place.key for each in entries]
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        for start in range(0, 40, 5):
            put(store, entries[start : start + 5], keep=entries)
        kept = stored_keys(store)
        assert 10 < len(kept) < 40
        assert kept == set(keys[: len(kept)])


@pytest.mark.parametrize("jump", [-(10**18), 10**18])
def test_what_was_used_last_stays_though_the_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    """For the next process too."""
    entries = [entry(links(prompt(seed))[0], words=LARGE) for seed in range(30)]
    keys = [each.place.key for each in entries]
    for each in entries:
        with open_store(tmp_path / "store", MIN_BYTES) as store:
            put(store, [each])
            store.touch(keys[:1])
        now = time.time_ns() + jump
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        jump = -jump
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        kept = stored_keys(store)
    assert kept == {keys[0], *keys[-len(kept) + 1 :]}


def test_a_prompt_that_used_no_entry_is_no_error(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        store.touch([])


def test_foreign_files_count_and_stay(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", MIN_BYTES) as store:
        put_links(store, [links(prompt(seed))[0] for seed in range(8)], LARGE)
        (tmp_path / "store" / "notes").mkdir()
        (tmp_path / "store" / "notes" / "film.mp4").write_bytes(bytes(5 << 20))
        put_links(store, [links(prompt(seed))[0] for seed in range(8, 20)], LARGE)
        assert bytes_in(tmp_path / "store") <= MIN_BYTES
        assert 0 < len(stored_keys(store)) < 8
        (tmp_path / "store" / "film.mp4").write_bytes(bytes(3 << 20))
        assert put_links(store, links(prompt(30)), LARGE) == [Outcome.NO_ROOM]
        assert "of at most 8.39 MB" in store.lack
    assert (tmp_path / "store" / "notes" / "film.mp4").exists()


def test_the_disk_keeps_what_it_must_have_free(tmp_path: Path, monkeypatch: Any) -> None:
    with open_store(tmp_path / "store", min_free_bytes=1 << 30) as store:
        put_links(store, [links(prompt(seed))[0] for seed in range(8)], LARGE)
        monkeypatch.setattr(store, "free_bytes", lambda: (1 << 30) + (1 << 17))
        put_links(store, links(prompt(8)), LARGE)
        assert len(stored_keys(store)) < 8
        monkeypatch.setattr(store, "free_bytes", lambda: 1 << 20)
        before = stored_keys(store)
        # Evicting everything that may go would not be enough, so nothing is evicted.
        assert put_links(store, links(prompt(9)), LARGE) == [Outcome.NO_ROOM]
        assert "the disk has 1.05 MB free" in store.lack
        assert stored_keys(store) == before


def test_what_earlier_versions_kept_beside_pages_goes(tmp_path: Path) -> None:
    """And their pages are found."""
    (link,) = links(prompt(0))
    with open_store(tmp_path / "store") as store:
        put_links(store, [link])
    for name in ("index.sqlite3", "index.sqlite3-wal", "sights"):
        (tmp_path / "store" / name).touch()
    with open_store(tmp_path / "store") as store:
        assert store.oddities() == []
        assert stored_entry(store, EntryPlace(link, PAGES).key) is not None


def test_pages_that_other_tools_have_copied_are_found(tmp_path: Path) -> None:
    (link,) = links(prompt(0))
    with open_store(tmp_path / "store") as store, open_store(tmp_path / "other") as other:
        put_links(store, [link])
        shutil.copy(next((tmp_path / "store").glob("*.safetensors")), tmp_path / "other")
        put_links(other, links(prompt(1)))
        assert EntryPlace(link, PAGES).key in stored_keys(other)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    folder, chain = tmp_path / "store", links(prompt(0, 512))
    with open_store(folder) as store, open_store(tmp_path / "other") as other:
        put_links(other, chain)
        (folder / file_of(chain[0])).symlink_to(tmp_path / "other" / file_of(chain[0]))
        os.mkfifo(folder / file_of(chain[1]))
        keys = [EntryPlace(link, PAGES).key for link in chain]
        assert store.sizes(keys) == [0, 0]
        with pytest.raises(OSError, match="symbolic"):
            store.get([(keys[0], 1)])
        assert store.get([(keys[1], 1)]) == [b""]


WRITER = """
import sys
from pathlib import Path
from tests.support.store_entries import bytes_in, entry, links, open_store, prompt, put
from paged_kv.store.options import MIN_BYTES
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
with open_store(folder, MIN_BYTES, lock_s=240) as store:
    for at in range(60):
        put(store, [entry(link, words=30_000) for link in links(prompt(1000 * seed + at, 600))])
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
        keys = stored_keys(store)
        assert len(keys) > 50
        with store.exclusive() as contents:
            assert contents.files.keys() == keys
        assert store.oddities() == []
