"""The lookup of stored blocks, against trying every possible end."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.ring import Ring
from paged_kv.store.keys import EntryPlace, Link
from paged_kv.store.lookup import CHECKPOINT, Wanted, find
from tests.support.examples import examples
from tests.support.store_entries import identity

PAGE = 3
ROOT = Link.root(identity())


def chain(tokens: Sequence[int]) -> list[Link]:
    links = [ROOT]
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        links.append(links[-1].then(tokens[start : start + PAGE]))
    return links[1:]


def needed(wanted: Wanted, count: int) -> list[EntryPlace]:
    """Everything that a hit of so many blocks reads."""
    links = chain(wanted.tokens)[:count]
    places = [
        EntryPlace(link, part) for link in links[wanted.held // PAGE :] for part in wanted.parts
    ]
    for part, ring in wanted.rings:
        places += [EntryPlace(links[block], part) for block in ring.held(count - 1)]
    return places + [EntryPlace(links[-1], CHECKPOINT)] * wanted.needs_checkpoint


@examples(150)
@given(
    tokens=st.lists(st.integers(0, 1), min_size=2, max_size=14),
    stored=st.lists(
        st.tuples(
            st.integers(0, 14),
            st.lists(st.integers(0, 1), max_size=4),
            st.sets(st.sampled_from(["pages 0", "pages 1", CHECKPOINT]), min_size=1),
        ),
        max_size=8,
    ),
    held=st.sampled_from([0, 0, 1, 2]),
    beyond=st.sampled_from([0, 0, 1, 3, 5]),
    needs_checkpoint=st.booleans(),
    has_ring=st.booleans(),
    lost=st.integers(0, 20),
)
def test_the_longest_stored_beginning_is_found(
    tokens: list[int],
    stored: list[tuple[int, list[int], set[str]]],
    held: int,
    beyond: int,
    needs_checkpoint: bool,
    has_ring: bool,
    lost: int,
) -> None:
    """Prompts that begin like this one, or nearly."""
    places = {
        EntryPlace(link, part)
        for common, others, parts in stored
        for link in chain([*tokens[:common], *others])
        for part in parts
    }
    keys = sorted(place.key for place in places)
    without = keys[lost : lost + 2]
    held = min(held, len(tokens) // PAGE) * PAGE
    if not needs_checkpoint and not has_ring:
        beyond = max(beyond, held)  # pages in memory are known
    wanted = Wanted(
        ROOT,
        tokens,
        held,
        beyond,
        ("pages 0",),
        needs_checkpoint,
        PAGE,
        (("pages 1", Ring(2)),) if has_ring else (),
    )
    there = set(keys) - set(without)
    counts = [
        count
        for count in range(1, len(tokens) // PAGE + 1)
        if count * PAGE > beyond and there.issuperset(place.key for place in needed(wanted, count))
    ]
    found = find(wanted, keys, without)
    assert (0 if found is None else len(found.links)) == max(counts, default=0)
    if found is not None:
        assert list(found.places) == needed(wanted, len(found.links))
        assert set(found.places) <= set(wanted.places)
        assert EntryPlace(found.links[-1], found.places[-1].part).key == found.end_key
