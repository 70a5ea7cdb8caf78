"""A failing disk: opening a store raises a clear error, and later failures are misses."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paged_kv.store import folder_store as folder_module
from paged_kv.store.blob_store import Outcome, verify
from paged_kv.store.entry_file import Buffer
from paged_kv.store.folder_store import FolderStore, StoreError
from paged_kv.store.keys import EntryPlace, Link, Wanted, find
from paged_kv.store.options import MIN_BYTES
from paged_kv.store.tier import Tier, Waits
from paged_kv.store.tiered_store import folder_tier
from paged_kv.store.writer import SLOW
from tests.support.folders import ROOT
from tests.support.patience import wait_until
from tests.support.store_entries import (
    PAGE_SIZE,
    PAGES,
    entry,
    identity,
    is_right,
    links,
    open_store,
    prompt,
    put,
    stored_entry,
    stored_keys,
)
from tests.support.system_calls import CALLS, SystemCalls

ERRORS = (errno.EIO, errno.ENOENT, errno.ENOSPC)
TEXT = prompt(5, 768)


def failing(error: int) -> Any:
    def fail() -> None:
        raise OSError(error, os.strerror(error))

    return fail


def wanted(tokens: list[int]) -> Wanted:
    return Wanted(Link.root(identity()), tokens, 0, 0, (PAGES,), False, PAGE_SIZE)


def found(store: Tier, tokens: list[int]) -> int:
    """The number of a prompt's stored tokens; everything that is read is right."""
    waits = Waits()
    held = store.ask(wanted(tokens), waits)
    stored = find(wanted(tokens), held)
    if stored is None:
        return 0
    for read in store.read([(place, held[place.key]) for place in stored.places], waits):
        if read is None:
            return 0
        assert is_right(read)
    return stored.num_tokens


def save(store: Tier, tokens: list[int], words: int = 1000) -> None:
    for link in links(tokens):
        made = entry(link, words=words)
        if not store.queue.knows(made.place.key) and store.queue.has_room(made.nbytes):
            store.queue.save(made)


def assert_sound(folder: Path) -> None:
    """The next process can read all entries, and none of them is wrong."""
    with open_store(folder, MIN_BYTES) as store:
        for key in stored_keys(store):
            read = stored_entry(store, key)
            assert read is not None
            assert is_right(read)
        _, findings = verify(store)
        assert {finding.problem for finding in findings} <= {"left by a writer that died"}


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_every_system_call_may_fail_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    refused = ended = 0
    for number in range(1, 1000):
        folder = tmp_path / "store"
        calls = SystemCalls(number, failing(ERRORS[(first + number) % len(ERRORS)]), CALLS)
        monkeypatch.setattr(folder_module, "os", calls)
        store = None
        with suppress(StoreError):
            store = folder_tier(open_store(folder, MIN_BYTES))
        if store is None:
            refused += 1
        else:
            save(store, TEXT)
            store.queue.flush()
            assert found(store, TEXT) in (0, 256, 512, 768)
            store.close()
            stats = store.stats()
            # The counts include everything that was not stored or not found.
            assert stats.errors or stats.tokens_found == 0
        monkeypatch.setattr(folder_module, "os", os)
        assert_sound(folder)
        shutil.rmtree(folder)
        if calls.count < number:
            ended = number
            break
    assert refused > 5
    assert ended > 40


def test_a_file_is_flushed_before_it_has_its_name_and_the_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store") as store:
        calls = SystemCalls(0, lambda: None, ("write", "utime", "fsync", "rename"))
        monkeypatch.setattr(folder_module, "os", calls)
        put(store, [entry(link) for link in links(TEXT[:512])])
    assert calls.names_called == [
        *(2 * ["write", "write", "utime", "fsync", "rename"]),  # the entries
        *("write", "fsync", "rename"),  # the count of bytes
        "fsync",
    ]


def test_a_disk_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *others: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *others, **named)

    folder = tmp_path / "store"
    open_store(folder).close()
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StoreError, match="Read-only file system") as caught:
        open_store(folder)
    assert str(folder) in str(caught.value)


def test_damaged_files_are_misses_and_are_stored_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with_store = folder_tier(open_store(folder))
    save(with_store, TEXT)
    with_store.queue.flush()
    middle = folder / f"{EntryPlace(links(TEXT)[1], PAGES).key}.safetensors"
    data = bytearray(middle.read_bytes())
    data[-5] ^= 4
    middle.write_bytes(data)
    may_write = threading.Event()
    with_store.queue.do(may_write.wait, is_first=True)
    assert found(with_store, TEXT) == 0
    save(with_store, TEXT)
    may_write.set()
    with_store.queue.flush()
    assert found(with_store, TEXT) == 768
    assert with_store.stats().errors == {"damaged": 1}
    with_store.close()


def test_a_disk_that_does_not_answer_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder_tier(open_store(tmp_path / "store"))
    save(store, TEXT)
    store.close()
    answers = threading.Event()
    real = FolderStore.get

    def get(self: FolderStore, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        answers.wait()
        return real(self, wanted)

    monkeypatch.setattr("paged_kv.store.writer.FIRST_S", 0.0)
    monkeypatch.setattr("paged_kv.store.writer.LONGEST_S", 0.0)
    monkeypatch.setattr(FolderStore, "patience_s", 0.1)
    store = folder_tier(open_store(tmp_path / "store"))
    monkeypatch.setattr(FolderStore, "get", get)
    assert [found(store, TEXT) for _ in range(20)] == [0] * 20
    # Only the first of them waited.
    assert store.stats().errors == {"TimeoutError": 1}
    answers.set()
    wait_until(lambda: found(store, TEXT) == 768)
    store.close()


def test_a_slow_disk_drops_and_counts_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FolderStore, "queue_bytes", 100_000)
    store = folder_tier(open_store(tmp_path / "store"))
    begins, answers = threading.Event(), threading.Event()
    real = FolderStore.put

    def slow(self: FolderStore, *arguments: Any) -> list[Outcome]:
        begins.set()
        answers.wait()
        return real(self, *arguments)

    monkeypatch.setattr(FolderStore, "put", slow)
    save(store, prompt(999))
    begins.wait()
    with caplog.at_level(logging.WARNING):
        for seed in range(100):
            save(store, prompt(seed))
    dropped = store.stats().dropped[SLOW]
    # A file holds 4,000 bytes.
    assert dropped == 101 - 100_000 // 4000
    assert len(caplog.records) == 1
    answers.set()
    assert store.queue.flush()
    assert store.stats().entries_written == 101 - dropped
    # Dropped entries do not count as stored.
    assert store.queue.knows(EntryPlace(links(prompt(0))[0], PAGES).key)
    assert not store.queue.knows(EntryPlace(links(prompt(99))[0], PAGES).key)
    store.close()


@pytest.mark.slow
def test_the_end_of_a_process_writes_what_waits(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from paged_kv.store.tiered_store import TieredStore, folder_tier
from tests.support.store_entries import *
store = TieredStore([folder_tier(open_store(Path({str(tmp_path / "store")!r})))])
for seed in range(50):
    store.tiers[0].queue.save(entry(links(prompt(seed))[0], words=50_000))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    with open_store(tmp_path / "store") as after:
        assert len(stored_keys(after)) == 50
