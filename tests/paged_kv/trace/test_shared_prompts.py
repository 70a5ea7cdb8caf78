"""A replay counts the pages that prompts share once, as sets of pages do."""

import random

from hypothesis import given
from hypothesis import strategies as st

from paged_kv.trace.shared_prompts import Runs, common_pages, pages_saved, runs_of

Prompt = list[int]


def as_runs(prompts: list[Prompt]) -> list[Runs]:
    """The runs of prompts, of which each number stands for a page."""
    found: list[Runs] = []
    for number, prompt in enumerate(prompts):
        shared = [common(prompt, other) for other in prompts[:number]]
        most = max(shared, default=0)
        like = found[shared.index(most)] if most else ()
        found.append(runs_of(number, len(prompt), like, most))
    return found


def common(some: Prompt, others: Prompt) -> int:
    pairs = zip(some, others, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


prompts_of_pages = st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=8)


@given(prompts=prompts_of_pages, seed=st.integers(0, 100))
def test_pages_in_common_are_counted_once(prompts: list[Prompt], seed: int) -> None:
    runs = as_runs(prompts)
    for a, some in zip(runs, prompts, strict=True):
        for b, others in zip(runs, prompts, strict=True):
            assert common_pages(a, b) == common(some, others)
    rng = random.Random(seed)
    held = [rng.randrange(len(prompt) + 3) for prompt in prompts]
    pages = {
        tuple(prompt[: at + 1])
        for prompt, count in zip(prompts, held, strict=True)
        for at in range(min(count, len(prompt)))
    }
    whole = sum(min(count, len(prompt)) for prompt, count in zip(prompts, held, strict=True))
    assert pages_saved(zip(runs, held, strict=True)) == whole - len(pages)
