"""The lookup of stored blocks, against trying every possible end."""

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.store.keys import EntryPlace, Link
from paged_kv.store.lookup import CHECKPOINT, Wanted, find
from tests.support.examples import examples
from tests.support.store_entries import identity

PAGE = 3
PART = "pages 0"
ROOT = Link.root(identity())

Tokens = st.lists(st.integers(0, 1), max_size=11)


class Files:
    """Stored places, and an index of them."""

    def __init__(self) -> None:
        self.places: dict[str, EntryPlace] = {}

    def add(self, place: EntryPlace) -> None:
        self.places[place.key] = place

    def behind(self, parent: str) -> list[EntryPlace]:
        return [place for place in self.places.values() if place.link.parent == parent]

    def children(self, parent: str) -> list[tuple[int, str]]:
        return [(len(place.link.tokens), place.key) for place in self.behind(parent)]

    def closest(self, parent: str, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return sorted({place.link.tokens for place in self.behind(parent)})


def chain(tokens: Sequence[int]) -> list[Link]:
    links = [ROOT]
    for start in range(0, len(tokens), PAGE):
        links.append(links[-1].then(tokens[start : start + PAGE]))
    return links[1:]


def longest(files: Files, wanted: Wanted, without: set[str]) -> int:
    """The largest number of the prompt's tokens, among all possible ends, for which everything
    needed is stored."""
    there = files.places.keys() - without

    def has_all(links: Sequence[Link], part: str) -> bool:
        return all(EntryPlace(link, part).key in there for link in links)

    best = 0
    for end in range(len(wanted.tokens) + 1):
        links = chain(wanted.tokens[:end])
        read = [link for link in links if link.end > wanted.held]
        if not all(has_all(read, part) for part in wanted.parts):
            continue
        if not wanted.needs_checkpoint or (links and has_all(links[-1:], CHECKPOINT)):
            best = max(best, end)
        if end % PAGE == 0 and end >= wanted.held and not wanted.needs_checkpoint:
            for place in files.behind((links or [ROOT])[-1].digest):
                common = common_prefix(place.link.tokens, wanted.tokens[end:])
                is_split = common < len(place.link.tokens) == PAGE
                if is_split and not wanted.splits_full_blocks:
                    continue
                if all(has_all([place.link], part) for part in wanted.parts):
                    best = max(best, end + common)
    return best if best > wanted.beyond else 0


FLAGS = {"needs_checkpoint": False, "has_parts": True, "splits_full_blocks": False}
CASE: dict[str, Any] = {**FLAGS, "held": 0, "beyond": 0, "lost": 2}


@examples(150)
@given(
    tokens=st.lists(st.integers(0, 1), min_size=2, max_size=11),
    stored=st.lists(
        st.tuples(
            st.integers(0, 11),
            st.lists(st.integers(0, 1), max_size=4),
            st.booleans(),
            st.sampled_from([0, 0, 0, 1, 2]),
        ),
        max_size=8,
    ),
    held=st.sampled_from([0, 0, 1, 2]),
    beyond=st.sampled_from([0, 0, 0, 1, 3, 5]),
    needs_checkpoint=st.booleans(),
    has_parts=st.booleans(),
    splits_full_blocks=st.booleans(),
    lost=st.integers(0, 20),
)
# A stored block of two tokens, of which the prompt has one; and as much is stored as is in memory.
@example(**CASE, tokens=[0, 0, 0, 0], stored=[(4, [0], False, 0)])
@example(
    **{**CASE, "beyond": 1, "splits_full_blocks": True}, tokens=[0, 0], stored=[(1, [], False, 0)]
)
def test_the_longest_stored_beginning_is_found(
    tokens: list[int],
    stored: list[tuple[int, list[int], bool, int]],
    held: int,
    beyond: int,
    needs_checkpoint: bool,
    has_parts: bool,
    splits_full_blocks: bool,
    lost: int,
) -> None:
    """Prompts that begin like this one, or nearly."""
    files = Files()
    for common, others, has_checkpoint, first in stored:
        links = chain([*tokens[:common], *others])
        for link in links[first:]:
            files.add(EntryPlace(link, PART))
        if has_checkpoint and links:
            files.add(EntryPlace(links[-1], CHECKPOINT))
    without = set(sorted(files.places)[lost : lost + 2])
    parts = (PART,) if has_parts or not needs_checkpoint else ()
    held = min(held, len(tokens) // PAGE) * PAGE
    beyond = max(beyond, 0 if needs_checkpoint else held)
    wanted = Wanted(
        ROOT,
        tokens,
        held,
        beyond,
        parts,
        needs_checkpoint,
        PAGE,
        splits_full_blocks=splits_full_blocks,
    )
    found = find(wanted, files, without)
    expected = longest(files, wanted, without)
    if found is None:
        assert not expected
        return
    held_tokens = [token for link in found.links for token in link.tokens]
    assert common_prefix(held_tokens, tokens) == expected
    assert found.links == tuple(chain(held_tokens))
    assert all(key in files.places.keys() - without for key in found.keys)
    assert EntryPlace(found.links[-1], found.places[-1].part).key == found.end_key
    assert (found.places[-1].part == CHECKPOINT) == needs_checkpoint
