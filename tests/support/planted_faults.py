"""Faults to plant into correct GPU kernels, from planted_faults.txt."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_kv.kernels.pages.page_format import FormatName

# Tables and lengths: a sequence that ends in a shared page, one that shares none, two branches.
SHARING = (
    ((9,), (0,), (0, 1, 2), (0, 1, 3), (0, 4, 5), (0, 4, 6)),
    (30, 200, 520, 600, 513, 700),
)
DIALECTS = ("metal", "cuda")


@dataclass(frozen=True)
class Use:
    """How the kernels run in which a fault must show.

    Attributes:
        writes: whether the kernel that attends writes a token of each row too.
        least: tokens of a simdgroup's part, if others than usual.
        shares: whether the sequences are those of `SHARING`.
        latent, copy: whether pages hold latents, or are copied; else they are attended to.
    """

    queries: int = 1
    lengths: tuple[int, ...] = (70, 33)
    formats: tuple[FormatName, ...] = ("fp16",)
    gqa: int = 3
    writes: bool = False
    least: int = 0
    softcap: float | None = None
    shares: bool = False
    dim: int = 64
    latent: bool = False
    copy: bool = False
    bfloat16: bool = False


@dataclass(frozen=True)
class Fault:
    """A change to the text of kernels, and the expected report; empty if only numbers are wrong.

    Attributes:
        often: the dialect in which it is no part of the soak; empty if there is none.
    """

    name: str
    said: str
    sound: str
    planted: str
    dialects: tuple[str, ...]
    often: str
    use: Use


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


VALUES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("queries", "gqa", "least", "dim"), int),
    **dict.fromkeys(("writes", "shares", "latent", "copy", "bfloat16"), lambda text: True),
    "lengths": _numbers,
    "formats": lambda text: tuple(text.split(",")),
    "softcap": float,
}


def _fault(heading: str, *change: str) -> Fault:
    name, said, words = (part.strip() for part in heading.split("|"))
    given = dict(word.partition("=")[::2] for word in words.split())
    dialects = tuple(each for each in DIALECTS if given.pop(each, None) is not None) or DIALECTS
    often = given.pop("ci", "none")
    sound, planted = (
        "\n".join(line[1:] for line in change if line[0] in signs) for signs in (" -", " +")
    )
    use = Use(**{word: VALUES[word](text) for word, text in given.items()})
    return Fault(name, said, sound, planted, dialects, often or dialects[0], use)


def _faults(text: str) -> list[Fault]:
    blocks = re.split(r"^# ", re.sub(r"^## .*", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return [_fault(*filter(None, block.splitlines())) for block in blocks[1:]]


FAULTS = _faults(Path(__file__).with_suffix(".txt").read_text())
