"""Counts the pages that prompts have in common.

A prompt's full pages are a list of runs: each the pages [first, end) of it that some prompt was the
first to have. Two prompts have the same first pages as far as their runs are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Run(NamedTuple):
    """Pages [first, end) of a prompt, which the prompt `owner` was the first to have."""

    owner: int
    first: int
    end: int


Runs = tuple[Run, ...]


def runs_of(number: int, pages: int, like: Runs = (), shared: int = 0) -> Runs:
    """The runs of a prompt of so many pages, of which the first `shared` ones are those of an
    earlier prompt."""
    before = _first_pages(like, shared)
    return (*before, Run(number, shared, pages)) if pages > shared else before


def common_pages(some: Runs, others: Runs) -> int:
    """How many first pages two prompts have in common."""
    common = 0
    for run, other in zip(some, others, strict=False):
        if run.owner != other.owner:
            break
        common = min(run.end, other.end)
        if run.end != other.end:
            break
    return common


def pages_saved(held: Iterable[tuple[Runs, int]]) -> int:
    """How many pages need not be there twice, if of each prompt the first so many are."""
    ends: dict[int, int] = {}
    saved = 0
    for runs, pages in held:
        for run in _first_pages(runs, pages):
            end = ends.get(run.owner, run.first)
            saved += min(end, run.end) - run.first
            ends[run.owner] = max(end, run.end)
    return saved


def _first_pages(runs: Runs, pages: int) -> Runs:
    return tuple(run._replace(end=min(run.end, pages)) for run in runs if run.first < pages)
