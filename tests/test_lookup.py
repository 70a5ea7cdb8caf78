"""What of a prompt is stored, against trying every end that there is."""

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.store.keys import Link, Place
from paged_kv.store.lookup import CHECKPOINT, Wanted, find
from tests.store_entries import identity

PAGE = 3
PART = "pages 0"
ROOT = Link.root(identity())

Tokens = st.lists(st.integers(0, 1), max_size=11)


class Files:
    """Places that are stored, and an index of them."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self._behind: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def add(self, place: Place) -> None:
        if place.key not in self.keys:
            self.keys.add(place.key)
            self._behind[place.link.parent].append((len(place.link.tokens), place.key))

    def children(self, parent: str) -> list[tuple[int, str]]:
        return self._behind[parent]

    def has(self, link: Link, part: str) -> bool:
        return Place(link, part).key in self.keys


def chain(tokens: Sequence[int]) -> list[Link]:
    links = [ROOT]
    for start in range(0, len(tokens), PAGE):
        links.append(links[-1].then(tokens[start : start + PAGE]))
    return links[1:]


def longest(files: Files, wanted: Wanted, without: set[str]) -> int:
    """The furthest end, of all, up to which everything is stored."""
    best = 0
    for end in range(wanted.beyond + 1, len(wanted.tokens) + 1):
        links = chain(wanted.tokens[:end])
        needed = [
            Place(link, part).key
            for link in links
            if link.end > wanted.held
            for part in wanted.parts
        ]
        if wanted.needs_checkpoint:
            needed.append(Place(links[-1], CHECKPOINT).key)
        if all(key in files.keys - without for key in needed):
            best = end
    return best


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    stored=st.lists(st.tuples(Tokens, st.booleans(), st.integers(0, 3)), max_size=8),
    tokens=Tokens,
    held=st.integers(0, 2),
    beyond=st.integers(0, 5),
    needs_checkpoint=st.booleans(),
    has_parts=st.booleans(),
    lost=st.integers(0, 20),
)
def test_the_longest_stored_beginning_is_found(
    stored: list[tuple[list[int], bool, int]],
    tokens: list[int],
    held: int,
    beyond: int,
    needs_checkpoint: bool,
    has_parts: bool,
    lost: int,
) -> None:
    files = Files()
    for prompt, has_checkpoint, first in stored:
        links = chain(prompt)
        for link in links[first:]:
            files.add(Place(link, PART))
        if has_checkpoint and links:
            files.add(Place(links[-1], CHECKPOINT))
    without = set(sorted(files.keys)[lost : lost + 2])
    parts = (PART,) if has_parts or not needs_checkpoint else ()
    held = min(held, len(tokens) // PAGE) * PAGE
    beyond = max(beyond, 0 if needs_checkpoint else held)
    wanted = Wanted(ROOT, tokens, held, beyond, parts, needs_checkpoint, PAGE)
    found = find(wanted, files.children, without)
    expected = longest(files, wanted, without)
    assert (found.num_tokens if found else 0) == expected
    if found is not None:
        assert found.links == tuple(chain(tokens[:expected]))
        assert all(key in files.keys - without for key in found.keys)
        assert (found.places[-1].part == CHECKPOINT) == needs_checkpoint
