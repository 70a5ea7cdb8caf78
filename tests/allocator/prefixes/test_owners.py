"""Ends of sessions: the index gives up what only their prompts use, and nothing else."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import UnknownSession
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.prefix_node import Node, Owner
from paged_kv.allocator.prefixes.retention import Owners
from tests.support.examples import examples
from tests.support.reserving import reserve

PAGE = 4
Page = tuple[str, tuple[int, ...]]


class Owned:
    """An index whose prompts have owners; a salt is a namespace."""

    def __init__(self) -> None:
        self.allocator = BlockAllocator(ByteBudget(1000), 1, PAGE)
        self.index = PrefixIndex(PAGE)

    def insert(self, tokens: Sequence[int], session: str | None, salt: str = "") -> None:
        table = self.allocator.new_table()
        reserve(table, 0, len(tokens))
        blocks = [{self.allocator: block} for block in table.blocks]
        self.index.owners.mark(self.index.insert(salt, tokens, blocks), Owner(salt, session))
        self.allocator.drop(table)

    def end(self, session: str, salt: str = "") -> int:
        return self.index.end_session(Owner(salt, session))

    def known(self, tokens: Sequence[int], salt: str = "") -> int:
        return self.index.known(salt, tokens).num_tokens

    def pages(self) -> set[Page]:
        """All tokens up to the end of each node."""
        return {page_of(node) for node in self.index.nodes()}

    def check(self) -> None:
        self.allocator.check()
        assert len(self.index) == len(self.index.nodes())
        held = {node.blocks[self.allocator] for node in self.index.nodes()}
        assert self.allocator.stats().blocks_used == 0
        assert self.allocator.stats().blocks_cached == len(held)


def page_of(node: Node) -> Page:
    tokens: tuple[int, ...] = ()
    salts = {"": hash(""), "alice": hash("alice")}
    while node.parent is not None:
        tokens, node = node.tokens + tokens, node.parent
    return next(salt for salt, its in salts.items() if its == node.path_hash), tokens


def test_pins_stay_timed_ones_too_and_what_is_in_use_keeps_its_blocks() -> None:
    owned = Owned()
    owned.insert(list(range(16)), "a")
    owned.index.pin("", "", list(range(4)))
    path = owned.index.known("", list(range(8))).nodes
    owned.index.holds.hold("", path, 1.0, lambda _: 0.1, 1.0)
    table = owned.allocator.new_table()
    blocks = owned.index.known("", list(range(16))).nodes
    owned.allocator.refs.retain([node.blocks[owned.allocator] for node in blocks])
    table.change(tuple(node.blocks[owned.allocator] for node in blocks), 16)
    assert owned.end("a") == 2
    assert owned.known(list(range(16))) == 8
    assert owned.allocator.stats().blocks_used == 4
    owned.allocator.drop(table)
    owned.check()
    # What was held is nobody's from then on: the next session that goes through takes it along.
    owned.index.holds.expire(1.0)
    owned.index.holds.unpin("", list(range(4)))
    owned.insert(list(range(9)), "b")
    assert owned.end("b") == 3


def test_beyond_the_limit_the_least_recently_used_session_is_forgotten() -> None:
    owned = Owned()
    owned.index.owners = Owners(most=2)
    for session in "aba":
        owned.insert(list(range(10)), session)
    owned.insert([50], "c")
    with pytest.raises(UnknownSession):
        owned.end("b")
    assert owned.end("a") == 0  # what was b's is nobody's, but was not freed
    assert owned.known(list(range(10))) == 10
    assert owned.end("c") == 1
    assert not owned.index.owners._ends
    assert sum(bool(node.owners) for node in owned.index.nodes()) == 1


def test_a_prompt_is_forgotten_up_to_where_others_begin() -> None:
    owned = Owned()
    owned.insert([*range(8), 20, 21], None)
    owned.insert([*range(8), 30, 31], None)
    assert owned.index.forget_prompt("alice", [*range(8), 20, 21]) == 0
    assert owned.index.forget_prompt("", range(8)) == 0  # longer ones go through it
    assert owned.index.forget_prompt("", [*range(8), 20]) == 0
    assert owned.index.forget_prompt("", [*range(8), 20, 21, 22]) == 1
    assert owned.known([*range(8), 20, 21]) == 8
    assert owned.index.forget_prompt("", [*range(8), 30, 31]) == 3
    owned.check()


def test_forgetting_a_prompt_keeps_pins_and_prompts_of_sessions() -> None:
    owned = Owned()
    owned.insert(list(range(16)), None)
    owned.insert(list(range(12)), "a")
    assert owned.index.forget_prompt("", list(range(16))) == 1
    assert owned.index.forget_prompt("", list(range(12))) == 0
    assert owned.index.pin("", "", list(range(4))) == 4
    assert owned.end("a") == 2
    assert owned.index.forget_prompt("", list(range(4))) == 0
    owned.index.holds.unpin("", list(range(4)))
    assert owned.index.forget_prompt("", list(range(4))) == 1
    owned.check()


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
salts = st.sampled_from(["", "alice"])
sessions = st.sampled_from("abc")
operations = st.one_of(
    st.tuples(st.just("insert"), sessions | st.none(), salts, tokens),
    st.tuples(st.just("end"), sessions, salts),
    st.tuples(st.just("pin"), salts, tokens),
    st.tuples(st.just("evict"), st.integers(1, 4)),
)


class Model:
    """Beside an index the prompts that were inserted, each with its session and salt."""

    def __init__(self) -> None:
        self.owned = Owned()
        self.prompts: list[tuple[str | None, str, list[int]]] = []
        self.pins: list[tuple[str, list[int]]] = []
        self.has_evicted = False

    def insert(self, session: str | None, salt: str, prompt: list[int]) -> None:
        self.owned.insert(prompt, session, salt)
        self.prompts.append((session, salt, prompt))

    def pin(self, salt: str, prompt: list[int]) -> None:
        self.owned.index.pin(salt, salt, prompt)
        self.pins.append((salt, prompt))

    def evict(self, blocks: int) -> None:
        index = self.owned.index
        least = len(index) - blocks
        self.has_evicted |= index.evict(lambda: len(index) <= least) > 0

    def end(self, session: str, salt: str) -> None:
        if not any(each[:2] == (session, salt) for each in self.prompts):
            with pytest.raises(UnknownSession):
                self.owned.end(session, salt)
            return
        self.prompts = [each for each in self.prompts if each[:2] != (session, salt)]
        found, blocks = self.found(), len(self.owned.index)
        assert self.owned.end(session, salt) == blocks - len(self.owned.index)
        assert self.found() == found

    def found(self) -> list[int]:
        """How much of each prompt is found. Where something was evicted, a prompt's last tokens may
        be found in a page of another one, which it does not own: then full pages count."""
        known = [self.owned.known(prompt, salt) for _, salt, prompt in self.prompts]
        return [each // PAGE for each in known] if self.has_evicted else known

    def check(self) -> None:
        """All that is left is needed."""
        self.owned.check()
        for leaf in self.owned.index._leaves:
            of, page = page_of(leaf)
            prompts = [prompt for _, salt, prompt in self.prompts if salt == of]
            assert leaf.pins or any(is_used(page, prompt) for prompt in prompts)

    def finish(self) -> None:
        """End everything that can be ended."""
        for salt, prompt in self.pins:
            self.owned.index.holds.unpin(salt, prompt)
        for session, salt in {each[:2] for each in self.prompts if each[0] is not None}:
            self.end(str(session), salt)
        self.owned.index.forget()
        assert not self.owned.index.nodes()
        assert not self.owned.index.owners._ends


def is_used(page: tuple[int, ...], prompt: list[int]) -> bool:
    """Whether a prompt has a token in the last block of these tokens, and agrees with them."""
    common = min(len(page), len(prompt))
    return len(prompt) > (len(page) - 1) // PAGE * PAGE and page[:common] == tuple(prompt[:common])


@examples(100)
@given(st.lists(operations, max_size=25))
def test_the_end_of_a_session_leaves_what_others_need_and_nothing_else(
    history: list[tuple[Any, ...]],
) -> None:
    model = Model()
    for name, *arguments in history:
        getattr(model, name)(*arguments)
        model.check()
    has_others = bool(model.pins) or any(each[0] is None for each in model.prompts)
    for session in "abc":
        for salt in ("", "alice"):
            model.end(session, salt)
            model.check()
    assert has_others or not model.owned.index.nodes()
    model.finish()
