"""Prompts as the ids of their pages, for `benches.eviction`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.trace.requests import read_trace

Pages = Sequence[int]
"""The ids of a prompt's full pages. Equal ids have equal pages before them."""


class Prompt(NamedTuple):
    """A prompt's length in tokens, and its pages."""

    tokens: int
    pages: Pages


def full_pages(tokens: int) -> int:
    """The pages of a prompt that others can share: each computes its last token itself."""
    return max(0, tokens - 1) // PAGE_SIZE


def traced_prompts(file: Path) -> list[Prompt]:
    """The prompts of a trace, in the order of their arrival."""
    ids: dict[tuple[int, int], int] = {}
    prompts = []
    for request in read_trace(file).requests:
        pages: list[int] = []
        for page in range(full_pages(request.prompt_length)):
            before = pages[-1] if pages else -1
            key = before, request.token(page * PAGE_SIZE)
            pages.append(ids.setdefault(key, len(ids)))
        prompts.append(Prompt(request.prompt_length, pages))
    return prompts
