"""Makes up prompts as the ids of their pages."""

from collections.abc import Sequence

from hypothesis import strategies as st

# Each number of a prompt stands for the text of a page.
texts_of_prompts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)


def paths(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Page ids that are equal where all pages before them are, too."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(text[: end + 1]), len(ids)) for end in range(len(text))]
        for text in texts
    ]
