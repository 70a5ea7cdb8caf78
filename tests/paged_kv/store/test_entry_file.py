"""The bytes of a page file: decoding returns exactly what was encoded, and refuses all else."""

import random
from collections import Counter
from pathlib import Path

import pytest

from paged_kv.store import keys
from paged_kv.store.entry_file import decode, decode_place, encode
from paged_kv.store.errors import InvalidEntry, OtherEntry
from paged_kv.store.keys import EntryPlace, Link
from tests.support.store_damage import KINDS, damaged
from tests.support.store_entries import (
    PAGES,
    entry,
    identity,
    is_right,
    links,
    open_store,
    others,
    prompt,
)

CASES = 1000


def file_of(link: Link) -> tuple[str, bytes]:
    written = entry(link)
    return written.place.key, b"".join(encode(written))


def test_an_entry_comes_back_as_it_was() -> None:
    key, data = file_of(links(prompt(0, 300))[1])
    found = decode(data, key)
    assert is_right(found)
    assert decode_place(data[:4000]) == (PAGES, 44, identity().as_fields())


def test_a_thousand_damaged_files_are_all_refused() -> None:
    numbers = random.Random(0)
    files = [file_of(link) for link in links(prompt(1, 20 * 256))]
    seen: Counter[str] = Counter()
    for case in range(CASES):
        key, data = files[case % len(files)]
        kind, content = damaged(data, files[(case + 7) % len(files)][1], numbers)
        if content == data:
            continue
        seen[kind] += 1
        with pytest.raises(InvalidEntry):
            decode(content, key)
    assert set(seen) == set(KINDS)
    assert seen.total() > 0.9 * CASES


def test_every_byte_of_a_small_file_counts() -> None:
    written = entry(links([1, 2, 3])[0], words=4)
    data = b"".join(encode(written))
    for at in range(len(data)):
        content = bytearray(data)
        content[at] ^= 0x11
        with pytest.raises(InvalidEntry):
            decode(bytes(content), written.place.key)


def test_a_sound_file_under_another_name_is_refused() -> None:
    (first, _), (_, data) = [file_of(link) for link in links(prompt(3, 512))]
    with pytest.raises(OtherEntry):
        decode(data, first)


@pytest.fixture
def _one_hash_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        def __init__(self, data: bytes) -> None:
            pass

        def hexdigest(self) -> str:
            return "5" * 64

    monkeypatch.setattr(keys, "sha256", Stub)


@pytest.mark.usefixtures("_one_hash_for_all")
def test_what_collides_is_told_apart(tmp_path: Path) -> None:
    """All share one sha256, so decoding must compare tokens, parent and identity."""
    stored = Link.root(identity()).then([1, 2]).then([3, 4])
    with open_store(tmp_path / "store") as store:
        store.put([entry(stored)])
        assert is_right(store.get(EntryPlace(stored, PAGES)))
        for asked in others():
            with pytest.raises(OtherEntry):
                store.get(EntryPlace(asked, PAGES))
