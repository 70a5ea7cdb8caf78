"""Pictures of the documents say what the commands say."""

import re
from html import unescape
from itertools import groupby

import mlx.core as mx
import pytest

pytest.importorskip("matplotlib", reason="needs the extra plot")

from benches.pictures import PICTURES, watch_picture
from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.monitor.publisher import view_process

WATCH = PICTURES / "watch.svg"
TEXT = re.compile(r'<text class="[\w-]+-r\d+" [^>]*?\by="([\d.]+)"[^>]*>([^<]*)</text>')
NUMBER = re.compile(r"\b\d[\d.,]*(?: (?:B|kB|MB|GB)\b|%)?")
STALE = "run python -m benches.pictures"


def lines(svg: str) -> list[str]:
    """The lines of the terminal that a picture of rich shows, with two spaces between cells."""
    parts = [(y, unescape(text).replace("\xa0", " ").strip()) for y, text in TEXT.findall(svg)]
    return ["  ".join(text for _, text in line) for _, line in groupby(parts, lambda part: part[0])]


def between(svg: str, first: str, last: str) -> list[str]:
    """The lines from one that begins so to one that begins so."""
    shown = lines(svg)
    begin, end = (
        next(at for at, line in enumerate(shown) if line.startswith(start))
        for start in (first, last)
    )
    return shown[begin : end + 1]


def words(svg: str, first: str, last: str) -> list[str]:
    """What these lines say, but for the numbers: how wide these are says where lines are folded."""
    return NUMBER.sub("#", " ".join(between(svg, first, last))).split()


def watched_now() -> str:
    """What the command shows of a small pool."""
    pool = PagePool(1, max_bytes="1MB", name="small")
    sequence = Sequence(pool)
    cache = PagedKVCache(pool, 0, [sequence])
    keys = mx.zeros((1, 1, 300, 32), dtype=mx.float16)
    cache.batch.append(0, keys, keys)
    return watch_picture(view_process([pool]))


def test_the_picture_of_watch_has_the_words_that_the_command_prints() -> None:
    shown, printed = WATCH.read_text(encoding="utf-8"), watched_now()
    table = words(printed, "bytes ", "= held")
    assert {"allocated", "mapped", "beside", "held"} <= set(table)
    assert words(shown, "bytes ", "= held") == table, STALE
    for head in ("largest ", "■ used"):
        assert words(shown, head, head)[:9] == words(printed, head, head)[:9], STALE
