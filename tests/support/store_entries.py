"""Entries whose content follows from their place, so that a wrong read shows."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv.store.blob_store import Outcome
from paged_kv.store.entry_file import SUFFIX, Entry, decode, encode
from paged_kv.store.folder_store import FolderStore
from paged_kv.store.keys import EntryPlace, Identity, Link, Salt

PAGES = "pages 0"
PAGE_SIZE = 256


def identity(**changes: Any) -> Identity:
    """The identity of some model's pages."""
    fields: dict[str, Any] = {
        "model": "llama",
        "weights": "w",
        "settings": "s",
        "versions": "v",
        "geometry": "g",
        "page_format": "fp16",
        "rotation": "none",
        "page_size": PAGE_SIZE,
    }
    return Identity(**{**fields, **changes})


def links(tokens: Sequence[int], salt: Salt = None) -> list[Link]:
    """The blocks of a prompt; the last may not be full."""
    chain = [Link.root(identity(salt=salt))]
    for start in range(0, len(tokens), PAGE_SIZE):
        chain.append(chain[-1].then(tokens[start : start + PAGE_SIZE]))
    return chain[1:]


def others() -> list[Link]:
    """Blocks that are not that of tokens 3 and 4 behind 1 and 2: with other tokens, in it or
    before, or of another model or format."""
    roots = [Link.root(identity(weights="other")), Link.root(identity(page_format="q4"))]
    return [
        *links([9, 9]),
        Link.root(identity()).then([1]).then([3, 4]),
        *(root.then([1, 2]).then([3, 4]) for root in roots),
    ]


def prompt(seed: int, length: int = PAGE_SIZE) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(-5, 1000) for _ in range(length)]


def entry(link: Link, part: str = PAGES, words: int = 1000) -> Entry:
    """The entry that belongs at a place, and nowhere else."""
    place = EntryPlace(link, part)
    numbers = np.random.default_rng(int(place.key[:15], 16))
    pages = {f"layer.{layer}": numbers.integers(0, 1 << 16, words, np.uint16) for layer in (0, 1)}
    return Entry(place, pages, f'{{"words": {words}}}')


def is_right(found: Entry) -> bool:
    """Whether an entry is what `entry` makes for its place."""
    words = len(found.arrays["layer.0"])
    right = entry(found.place.link, found.place.part, words)
    return (
        found.place == right.place
        and found.notes == right.notes
        and found.arrays.keys() == right.arrays.keys()
        and all(np.array_equal(found.arrays[name], right.arrays[name]) for name in right.arrays)
    )


def open_store(folder: Path, max_bytes: int = 64 << 20, **options: Any) -> FolderStore:
    """A store that accepts a nearly full disk, which a test machine may have."""
    return FolderStore(folder, max_bytes, **{"min_free_bytes": 0, **options})


def bytes_in(folder: Path) -> int:
    """The bytes that a folder takes on the disk, each file counted once."""
    found = {}
    for path in folder.rglob("*"):
        try:
            about = path.lstat()
        except FileNotFoundError:
            continue
        found[about.st_ino] = max(about.st_size, about.st_blocks * 512)
    return sum(found.values())


def put(store: FolderStore, entries: Iterable[Entry], keep: Iterable[Entry] = ()) -> list[Outcome]:
    """Store entries; none of `keep` is evicted for them."""
    files = [(each.place.key, encode(each)) for each in entries]
    return store.put(files, {each.place.key for each in keep})


def stored_keys(store: FolderStore) -> set[str]:
    return {blob.name for blob in store.entries()}


def stored_entry(store: FolderStore, key: str) -> Entry | None:
    """The entry of a key, verified; None if there is none."""
    (nbytes,) = store.sizes([key])
    (data,) = store.get([(key, nbytes)])
    return decode(data, key) if data else None


def stored_entries(folder: Path) -> list[Entry]:
    """All entries of a folder."""
    return [decode(path.read_bytes(), None) for path in sorted(folder.glob(f"*{SUFFIX}"))]
