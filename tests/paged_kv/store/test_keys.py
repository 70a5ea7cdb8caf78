"""Keys of stored blocks depend on everything that determines the content, and never collide."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.ring import Ring
from paged_kv.store.keys import CHECKPOINT, EntryPlace, Identity, Link, Wanted, find, salt_bytes
from tests.support.examples import examples
from tests.support.store_entries import identity

CHANGES = {
    "model": "other",
    "weights": "other",
    "settings": "other",
    "versions": "other",
    "geometry": "other",
    "page_format": "q4",
    "rotation": "hadamard",
    "page_size": 128,
    "salt": "alice",
}


def key(identity: Identity, tokens: list[int] | None = None) -> str:
    return EntryPlace(Link.root(identity).then(tokens or [1, 2, 3]), "pages 0").key


def test_every_field_changes_every_key() -> None:
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(Identity)}
    keys = [key(identity())] + [key(identity(**{name: to})) for name, to in CHANGES.items()]
    assert len(set(keys)) == len(keys)
    assert all(len(each) == 64 and set(each) <= set("0123456789abcdef") for each in keys)


def test_fields_that_are_one_text_together_are_told_apart() -> None:
    assert key(identity(weights="ab", settings="c")) != key(identity(weights="a", settings="bc"))
    assert key(identity(salt=("a", "b"))) != key(identity(salt=("ab",)))
    assert key(identity(salt=("a", "b"))) != key(identity(salt=("atextb",)))
    assert key(identity(salt=("a", ("b",)))) != key(identity(salt=(("a",), "b")))


def test_salts_of_other_types_are_other_salts() -> None:
    salts = [None, "", b"", "1", b"1", 1, (), ("1",), (1,), "None", "text1"]
    assert len({salt_bytes(salt) for salt in salts}) == len(salts)


def test_a_salt_is_stored_by_its_digest() -> None:
    assert "alice" not in str(identity(salt="alice").as_fields())


def test_what_cannot_be_hashed_for_ever_is_refused() -> None:
    for salt in (object(), 1.5, frozenset({1}), ("a", [1])):
        with pytest.raises(ValueError, match="cannot be stored"):
            salt_bytes(salt)
    wrong: list[Any] = [1 << 63, -(1 << 63) - 1, 1.5, "a"]
    for token in wrong:
        with pytest.raises(ValueError, match="64-bit"):
            _ = Link.root(identity()).then([1, token]).digest


Tokens = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=5)


@examples(40)
@given(st.lists(Tokens, min_size=1, max_size=4), st.lists(Tokens, min_size=1, max_size=4))
def test_two_chains_have_one_digest_only_if_they_are_the_same(
    one: list[list[int]], other: list[list[int]]
) -> None:
    ends = []
    for blocks in (one, other):
        link = Link.root(identity())
        for block in blocks:
            link = link.then(block)
        ends.append(link)
    assert (ends[0].digest == ends[1].digest) == (one == other)
    assert (ends[0] == ends[1]) == (one == other)


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
