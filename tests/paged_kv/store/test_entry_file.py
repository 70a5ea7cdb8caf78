"""The bytes of a page file: decoding returns exactly what was encoded, and refuses all else."""

import random
from collections import Counter

import pytest

from paged_kv.store.entry_file import InvalidEntry, OtherEntry, decode, encode
from paged_kv.store.keys import Link
from tests.support.store_damage import KINDS, damaged
from tests.support.store_entries import (
    entry,
    is_right,
    links,
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
