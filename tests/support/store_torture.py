"""Kills writers of a page store: python -m tests.support.store_torture FOLDER --cycles 100

A forked process opens the store and puts entries into it as fast as it can; most of the time the
store is full. Meanwhile the parent stops it a few times, measures the folder, and then kills it.
The next process that opens the store must read nothing wrong, and `verify` may name only files that
a dead writer left and that it has removed.

With --steps the parent kills the writer at each system call of a put in turn, instead of at random;
with --every 3 at each third.

Prints JSON. It imports nothing that uses a GPU, so a cycle is short.
"""

import argparse
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from paged_kv.store import folder_store as folder_module
from paged_kv.store.blob_store import verify
from paged_kv.store.options import MIN_BYTES
from tests.support.store_entries import (
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
from tests.support.system_calls import CALLS, SystemCalls

CAP = MIN_BYTES
WORDS = 40_000  # In each of two layers: about 40 entries fill the store.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    told = arguments.folder, arguments.cycles, arguments.seed
    counts = kill_at_each_call(*told, arguments.every) if arguments.steps else kill_at_random(*told)
    print(json.dumps(counts))


def kill_at_random(folder: Path, cycles: int, seed: int) -> dict[str, Any]:
    """Kill a writer at a random moment, again and again."""
    numbers = random.Random(seed)
    counts = Counter(wrong_reads=0)
    for cycle in range(cycles):
        writer = os.fork()
        if not writer:
            write_for_ever(folder, seed + cycle)
        for _ in range(numbers.randrange(1, 4)):
            time.sleep(numbers.uniform(0, 0.03))
            os.kill(writer, signal.SIGSTOP)
            os.waitpid(writer, os.WUNTRACED)
            counts["most_bytes"] = max(counts["most_bytes"], bytes_in(folder))
            os.kill(writer, signal.SIGCONT)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        counts["most_bytes"] = max(counts["most_bytes"], bytes_in(folder))
        look(folder, counts)
    return {"cycles": cycles, "cap": CAP, **counts}


def kill_at_each_call(folder: Path, cycles: int, seed: int, every: int) -> dict[str, Any]:
    """Kill a writer at its n-th system call, for each n, or one of `every`, until it ends by itself
    or n is `cycles`."""
    counts = Counter(wrong_reads=0)
    for number in range(1, cycles + 1, every):
        writer = os.fork()
        if not writer:
            calls = SystemCalls(number, lambda: os.kill(os.getpid(), signal.SIGKILL), CALLS)
            vars(folder_module)["os"] = calls
            with open_store(folder, CAP) as store:
                first = [links(prompt(seed + number + at))[0] for at in (0, 1)]
                put(store, [entry(link, words=WORDS) for link in first])
                store.touch(sorted(stored_keys(store))[:5])
            os._exit(0)
        _, status = os.waitpid(writer, 0)
        counts["most_bytes"] = max(counts["most_bytes"], bytes_in(folder))
        look(folder, counts)
        counts["cycles"] += 1
        if not os.WIFSIGNALED(status):
            counts["ended"] += 1
            break
    return {"cap": CAP, **counts}


def write_for_ever(folder: Path, seed: int) -> None:
    """Until somebody kills this process."""
    try:
        with open_store(folder, CAP) as store:
            for at in range(1 << 30):
                chain = links(prompt(1000 * seed + at, 700))
                put(store, [entry(link, words=WORDS) for link in chain])
                store.touch(sorted(stored_keys(store))[:5])
    finally:
        # Never return into the loop of the process that forked this one.
        os._exit(1)


def look(folder: Path, counts: Counter[str]) -> None:
    """Read every entry, and count those that are wrong."""
    with open_store(folder, CAP) as store:
        for key in stored_keys(store):
            found = stored_entry(store, key)
            counts["reads"] += 1
            counts["wrong_reads"] += found is None or not is_right(found)
        for finding in verify(store)[1]:
            was_left = finding.problem == "left by a writer that died"
            is_gone = not (folder / finding.name).exists()
            counts["left_behind" if was_left and is_gone else "other_findings"] += 1
    counts["most_bytes"] = max(counts["most_bytes"], bytes_in(folder))


if __name__ == "__main__":
    main()
