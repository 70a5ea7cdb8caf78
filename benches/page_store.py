"""Times pages on disk and measures their size: python -m benches.page_store

    first token    the time to the first token of a prompt of 4,096 tokens on stdlib-llama, cold,
                   and from disk: each time with a new factory, and with the files dropped from the
                   system's page cache, which the bench verifies. Beside it, the time to open the
                   store, with the fingerprint of the weights, and whether the logits are equal
    throughput     of the store, in files of 16 MB, beside plain files of that size on the same
                   disk, written and flushed by one thread, read by as many as the store has
    on disk        bytes of a token on disk, of whole blocks, in each format

Sides that are compared take turns, and each figure is the median of its repetitions.
"""

from benches.openblas import BLAS

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_size_t, c_void_p
from mmap import PAGESIZE, PROT_READ, mmap
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import mlx.core as mx
import numpy as np

from benches.models import first_token, load_model, random_tokens
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.turns import ratio, seconds
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.store.entry_file import Entry, decode, encode
from paged_kv.store.folder_store import FolderStore
from paged_kv.store.keys import EntryPlace, Identity, Link
from paged_kv.store.tier import READERS

PROMPT = 4096
TURNS = {"float32": 5, "bfloat16": 3}
FILES, FILE_BYTES, ROUNDS = 16, 16 << 20, 7
CAP = 4 << 30
PATIENCE = 50
MEMORY = 1 << 30


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("PAGED_KV_BENCH_DIR")) as name:
        folder = Path(name)
        figures = {
            "blas": BLAS,
            "prompt_tokens": PROMPT,
            "first_token": {
                dtype: time_to_first_token(folder / dtype, dtype, turns)
                for dtype, turns in TURNS.items()
            },
            "throughput": throughput(folder),
            "bytes_per_token": {
                name: bytes_per_token(folder / f"format {name}", name)
                for name in ("fp16", "q8", "q4")
            },
        }
    write_result("page_store", figures)


def time_to_first_token(folder: Path, dtype: str, turns: int) -> dict[str, Any]:
    model, _ = load_model("stdlib-llama", getattr(mx, dtype))
    tokens = random_tokens(model, PROMPT)
    shares: list[float] = []

    def opened() -> PagedCacheFactory:
        return PagedCacheFactory(model, store=folder, store_bytes=CAP, max_bytes=MEMORY)

    def drop() -> None:
        shares.append(drop_from_page_cache(folder))

    colds, disks, answers = computed_and_found(model, tokens, PROMPT, opened, turns, drop)
    openings = [seconds(lambda: opened().close()) for _ in range(turns)]
    return {
        "cold_seconds": median(colds),
        "disk_seconds": median(disks),
        "cold_over_disk": ratio(colds, disks),
        "open_and_close_seconds": median(openings),
        "share_left_in_page_cache": max(shares),
        "logits_are_equal": all(
            token == answers[0][0] and bool(mx.array_equal(logprobs, answers[0][1]))
            for token, logprobs in answers
        ),
    }


def computed_and_found(
    model: Any,
    tokens: list[int],
    known: int,
    opened: Callable[[], PagedCacheFactory],
    turns: int,
    before_look: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[float], list[tuple[int, mx.array]]]:
    """Seconds to the first token of a prompt, computed and found by a factory that has nothing but
    a store with its first tokens, so many, in turns; and the first tokens with their log
    probabilities."""
    answers: list[tuple[int, mx.array]] = []

    def computed() -> None:
        cache = PagedCacheFactory(model, max_bytes=MEMORY).make_cache()
        answers.append(first_token(model, tokens, cache))

    def found() -> None:
        cache, cached = factory.fetch_cache(tokens)
        assert cached == min(known // PAGE_SIZE * PAGE_SIZE, len(tokens) - 1), cached
        answers.append(first_token(model, tokens[cached:], cache))

    factory = opened()
    cache = factory.make_cache()
    answers.append(first_token(model, tokens, cache))
    factory.insert_cache(tokens[:known], cache)
    factory.close()
    colds, founds = [], []
    for _ in range(turns):
        colds.append(seconds(computed))
        factory = opened()
        before_look()
        founds.append(seconds(found))
        factory.close()
    return colds, founds, answers


def drop_from_page_cache(folder: Path) -> float:
    """Take the pages' files out of the page cache; returns the share of them that it still has."""
    paths = list(folder.glob("*.safetensors"))
    for _ in range(PATIENCE):
        held = [path for path in paths if cached_bytes(path)]
        if not held:
            break
        for path in held:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        sleep(0.02)
    return sum(map(cached_bytes, paths)) / sum(path.stat().st_size for path in paths)


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache has. To read from it would bring in more."""
    with path.open("rb") as file, mmap(file.fileno(), 0, prot=PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        resident = np.zeros(-(-len(view) // PAGESIZE), np.uint8)
        addresses = [
            c_void_p(view.ctypes.data),
            c_size_t(len(view)),
            c_void_p(resident.ctypes.data),
        ]
        failed = CDLL(None).mincore(*addresses)
        assert not failed
        del view
        return int((resident & 1).sum()) * PAGESIZE


def throughput(folder: Path) -> dict[str, Any]:
    """Bytes a second of the store and of plain files."""
    numbers = np.random.default_rng(0)
    contents = [numbers.integers(0, 1 << 16, FILE_BYTES // 2, np.uint16) for _ in range(FILES)]
    identity = Identity("bench", "", "", "", "", "fp16", "none", PAGE_SIZE)
    places = [EntryPlace(Link.root(identity).then([at]), "pages 0") for at in range(FILES)]
    plain = folder / "plain"
    plain.mkdir()
    times: dict[str, list[float]] = {}
    shares: list[float] = []

    def timed(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(work))

    with FolderStore(folder / "store", CAP) as store, ThreadPoolExecutor(READERS) as readers:
        entries = [
            Entry(place, {"layer.0": words}, "")
            for place, words in zip(places, contents, strict=True)
        ]
        keys = [place.key for place in places]
        paths = [plain / f"{at}.safetensors" for at in range(FILES)]

        def write_all() -> None:
            store.put([(entry.place.key, encode(entry)) for entry in entries])

        def read(key: str) -> Entry:
            (nbytes,) = store.sizes([key])
            (data,) = store.get([(key, nbytes)])
            return decode(data, key)

        for _ in range(ROUNDS):
            timed("plain_write", lambda: list(map(write_plainly, paths, contents)))
            timed("store_write", write_all)
            left = max(drop_from_page_cache(place) for place in (plain, store.path))
            shares.append(left)
            timed("plain_read", lambda: list(readers.map(Path.read_bytes, paths)))
            timed("store_read", lambda: list(readers.map(read, keys)))
            timed("store_read_from_page_cache", lambda: list(readers.map(read, keys)))
            store.remove(keys)
            for path in paths:
                path.unlink()
    nbytes = FILES * FILE_BYTES
    return {
        "file_bytes": FILE_BYTES,
        "readers": READERS,
        "share_left_in_page_cache": max(shares),
        **{f"{name}_bytes_per_second": nbytes / median(each) for name, each in times.items()},
        "store_write_over_plain": ratio(times["plain_write"], times["store_write"]),
        "store_read_over_plain": ratio(times["plain_read"], times["store_read"]),
    }


def write_plainly(path: Path, words: Any) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    data = memoryview(words).cast("B")
    while len(data):
        data = data[os.write(fd, data) :]
    os.fsync(fd)
    os.close(fd)


def bytes_per_token(folder: Path, page_format: str) -> dict[str, float]:
    """What a whole block of stdlib-llama takes of the disk, and of memory, for a token. Not the
    first one: it may be larger."""
    model, _ = load_model("stdlib-llama", mx.bfloat16)
    tokens = random_tokens(model, 2 * PAGE_SIZE)
    factory = PagedCacheFactory(model, page_format=page_format, store=folder, max_bytes=MEMORY)
    cache = factory.make_cache()
    model(mx.array([tokens]), cache=cache)
    factory.insert_cache(tokens, cache)
    in_memory = factory.pool.groups[0].size.block_bytes / PAGE_SIZE
    factory.close()
    with FolderStore(folder, CAP) as store:
        sizes = [blob.nbytes for blob in store.entries()]
    assert len(sizes) * PAGE_SIZE == len(tokens)
    return {"disk": min(sizes) / PAGE_SIZE, "memory": in_memory}


if __name__ == "__main__":
    main()
