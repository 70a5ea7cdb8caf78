"""Keys of stored blocks depend on everything that determines the content, and never collide."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.store.keys import EntryPlace, Identity, Link, salt_bytes
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
            Link.root(identity()).then([1, token])


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
