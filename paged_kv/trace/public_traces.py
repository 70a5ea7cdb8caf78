"""Reads public traces of requests, to write them as traces of this project.

    mooncake   JSON lines of https://github.com/kvcache-ai/Mooncake: {"timestamp": ms,
               "input_length": tokens, "output_length": tokens, "hash_ids": [...]}, where each id
               names 512 tokens of the prompt, the last one maybe fewer, and all tokens before them
    azure      CSV of https://github.com/Azure/AzurePublicDataset: TIMESTAMP,ContextTokens,
               GeneratedTokens; it does not say what prompts share, so they share nothing

Two prompts share their first full pages as far as their ids are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paged_kv.trace.recorder import PAGE_SIZE
from paged_kv.trace.request_lines import RequestLines, TracedMemory, full_pages

MOONCAKE_BLOCK = 512
# More than any model takes. Longer ones would fill the memory with made-up pages.
MOST_TOKENS = 1 << 24
# Five centuries, which a float still counts in milliseconds.
MOST_MS = 1 << 44
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?(\+00:00)?$")
# Characters of what was found that a message shows.
_SHOWN = 80


@dataclass(frozen=True)
class PublicRequest:
    """A request of a public trace.

    Attributes:
        arrives: milliseconds since some time.
        prompt, answer: tokens.
        block_ids: of the prompt's blocks of 512 tokens; empty where nothing is known of them.
    """

    arrives: int
    prompt: int
    answer: int
    block_ids: Sequence[int] = ()

    @property
    def page_ids(self) -> list[int]:
        """For each full page of the prompt, the id of the block that it lies in."""
        if not self.block_ids:
            return []
        pages = range(full_pages(self.prompt))
        return [self.block_ids[page * PAGE_SIZE // MOONCAKE_BLOCK] for page in pages]


class PromptTree:
    """The pages of prompts, and which request had each first."""

    def __init__(self) -> None:
        # The number of a page and the request that had it, by the page before and the page's id.
        self._pages: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, number: int, page_ids: Iterable[int]) -> tuple[int, int]:
        """Add a prompt; returns the earlier request that begins like it for longest, and for how
        many pages. O(pages)."""
        page, like, shared = 0, 0, 0
        for page_id in page_ids:
            new = len(self._pages) + 1, number
            page, first = self._pages.setdefault((page, page_id), new)
            if first != number:
                like, shared = first, shared + 1
        return like, shared


def import_trace(name: str, source: Path, memory: TracedMemory, path: Path) -> int:
    """Write the public trace `source` of the format `name` as a trace to `path`; returns how many
    requests it has.

    Raises:
        ValueError: a line of the source is not one of its format; the message names the file, the
            line, what was found and what is needed. Nothing is written then.
        OSError: the source cannot be read, or the trace cannot be written.
    """
    # All of it is read first: one wrong line, and nothing is written.
    requests = read_requests(name, source)
    file, prompts = RequestLines(path, memory, name), PromptTree()
    began = requests[0].arrives
    for number, each in enumerate(requests):
        like, shared = prompts.add(number, each.page_ids)
        file.arrive(each.arrives - began, each.prompt, each.answer, like, shared)
    file.finish()
    return len(requests)


def read_requests(name: str, source: Path) -> list[PublicRequest]:
    """The requests of a public trace of the format `name`, in the order of arrival.

    Raises:
        ValueError, OSError: as `import_trace`.
    """
    header, parse = FORMATS[name]
    requests: list[PublicRequest] = []
    # A binary file is refused for what its first line holds, not for its encoding.
    with source.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                if number == 1 and header:
                    _require_header(line, header)
                elif line.strip():
                    requests.append(_in_order(parse(line.strip()), requests))
            except ValueError as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    if not requests:
        raise ValueError(
            f"{source}, line 1: the file has no requests: give one in the {name} format"
        )
    return requests


def _require_header(line: str, header: str) -> None:
    if line.strip() != header:
        raise ValueError(f"the header is {_shown(line)}: it must be {header}")


def _in_order(request: PublicRequest, before: Sequence[PublicRequest]) -> PublicRequest:
    if before and request.arrives < before[-1].arrives:
        raise ValueError(
            f"the time is {before[-1].arrives - request.arrives:,} ms before that of the request "
            "above: sort the lines by their times"
        )
    return request


def _mooncake(line: str) -> PublicRequest:
    """The request of a JSON line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or sorted(content) != sorted(_MOONCAKE_FIELDS):
        fields = ", ".join(_MOONCAKE_FIELDS)
        raise ValueError(
            f"{_shown(line)} is no JSON object with the fields {fields}, and no others"
        )
    ids = content["hash_ids"]
    if not isinstance(ids, list) or not all(_is_count(each) for each in ids):
        raise ValueError(f"hash_ids is {_shown(ids)}: it must be a list of whole numbers from 0 on")
    prompt = _tokens("input_length", content["input_length"], 1)
    blocks = -(-prompt // MOONCAKE_BLOCK)
    if len(ids) != blocks:
        raise ValueError(
            f"hash_ids has {len(ids):,} ids: {prompt:,} tokens need {blocks:,}, one for each "
            f"{MOONCAKE_BLOCK} tokens and one for the rest"
        )
    if not _is_count(content["timestamp"]) or content["timestamp"] > MOST_MS:
        raise ValueError(
            f"timestamp is {_shown(content['timestamp'])}: it must be a whole number of "
            f"milliseconds from 0 to {MOST_MS:,}"
        )
    answer = _tokens("output_length", content["output_length"], 0)
    return PublicRequest(content["timestamp"], prompt, answer, tuple(ids))


def _azure(line: str) -> PublicRequest:
    """The request of a CSV line, in milliseconds since 1970."""
    cells = line.split(",")
    if len(cells) != len(AZURE_HEADER.split(",")):
        raise ValueError(f"{_shown(line)} has {len(cells)} cells: it must have {AZURE_HEADER}")
    prompt = _tokens("ContextTokens", _number(cells[1]), 1)
    answer = _tokens("GeneratedTokens", _number(cells[2]), 0)
    return PublicRequest(_milliseconds(cells[0]), prompt, answer)


def _milliseconds(text: str) -> int:
    try:
        # Python takes other forms too, such as a date alone.
        moment = datetime.fromisoformat(text if _MOMENT.match(text) else "")
    except ValueError:
        raise ValueError(
            f"TIMESTAMP is {_shown(text)}: it must be like 2023-11-16 18:15:46.6805900"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _tokens(field: str, number: Any, least: int) -> int:
    if not _is_count(number) or not least <= number <= MOST_TOKENS:
        raise ValueError(
            f"{field} is {_shown(number)}: it must be a whole number of tokens from {least} to "
            f"{MOST_TOKENS:,}"
        )
    return int(number)


def _number(text: str) -> Any:
    """The number that a cell spells; the text itself if it spells none."""
    return int(text) if text.isdecimal() and len(text) < _SHOWN else text


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _shown(value: Any) -> str:
    """What was found, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# For each format, the first line of its files, or none, and what parses the others.
FORMATS: dict[str, tuple[str, Callable[[str], PublicRequest]]] = {
    "mooncake": ("", _mooncake),
    "azure": (AZURE_HEADER, _azure),
}
