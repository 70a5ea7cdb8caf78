"""Kills writers of a page store and damages its files, many times more often than the tests:
python -m benches.page_store_faults

    killed     kill -9 of a writer at a random moment, then everything is read and verified
    damaged    files with flipped bits, cut off, with bytes appended or zeros in them, or exchanged
               for others; an accepted one ends the bench
"""

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benches.results_file import write_result
from paged_kv.store.entry_file import InvalidEntry, decode, encode
from tests.support.store_damage import damaged
from tests.support.store_entries import entry, links, prompt
from tests.support.store_torture import kill_at_random

KILLS, DAMAGED = 1000, 10_000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        figures = {"killed": kill_at_random(Path(folder) / "store", KILLS, 0), "damaged": refused()}
    assert not figures["killed"]["wrong_reads"]
    print(figures)
    print(f"written to {write_result('page_store_faults', figures)}")


def refused() -> dict[str, Any]:
    """Damage files, and read them."""
    numbers = random.Random(1)
    entries = [entry(link) for link in links(prompt(1, 50 * 256))]
    files = [(each.place.key, b"".join(encode(each))) for each in entries]
    kinds: Counter[str] = Counter()
    accepted = 0
    while kinds.total() < DAMAGED:
        (key, data), (_, other) = numbers.sample(files, 2)
        kind, content = damaged(data, other, numbers)
        if content == data:
            continue
        kinds[kind] += 1
        try:
            decode(content, key)
        except InvalidEntry:
            continue
        accepted += 1
    return {"files": kinds.total(), "accepted": accepted, "kinds": dict(kinds)}


if __name__ == "__main__":
    main()
