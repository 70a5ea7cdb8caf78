"""Rules for factories and the folder that they share, in any order."""

import random

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from paged_kv.store.blob_store import clear, gc, verify
from paged_kv.store.options import MIN_BYTES
from tests.support.state_machine.batch_rules import INDEX
from tests.support.state_machine.prompt_rules import PromptRules
from tests.support.store_damage import damaged
from tests.support.store_entries import bytes_in, open_store

MOST_HOMES = 3


def has_store(machine: "StoreRules") -> bool:
    return machine.world.store


class StoreRules(PromptRules):
    @rule(home=INDEX, number=st.integers(0, 100))
    def reopen(self, home: int, number: int) -> None:
        """Close a factory. Its caches stay usable, and another factory begins with what it has
        stored."""
        at = self.home(home)
        assert at.factory is not None
        at.factory.close()
        at.is_open = False
        self.pins = [pin for pin in self.pins if pin.home is not at]
        known = self.inserted[number % len(self.inserted)]
        self.computed(self.open_home(), [*known.tokens, 4], known.salt, 256, keep=False)

    @rule()
    def open_another(self) -> None:
        if len(self.open_homes()) < MOST_HOMES:
            self.open_home()

    @precondition(has_store)
    @rule(seed=st.integers(0, 1 << 16), share=st.sampled_from([0.1, 0.5]))
    def damage(self, seed: int, share: float) -> None:
        """Damage some files of the store."""
        numbers = random.Random(seed)
        files = sorted((self.folder / "store").glob("*.safetensors"))
        for path in numbers.sample(files, int(len(files) * share)):
            try:
                content, other = path.read_bytes(), numbers.choice(files).read_bytes()
                path.write_bytes(damaged(content, other, numbers)[1])
            except FileNotFoundError:
                # Another writer has evicted it.
                continue

    @precondition(has_store)
    @rule(work=st.sampled_from([verify, lambda place: gc(place, MIN_BYTES), clear]))
    def maintain(self, work: object) -> None:
        """Verify, shrink or clear the store as the command line does, while factories use it."""
        assert callable(work)
        with open_store(self.folder / "store", MIN_BYTES) as store:
            work(store)

    @invariant()
    def store_keeps_its_cap(self) -> None:
        if self.world.store:
            assert bytes_in(self.folder / "store") <= MIN_BYTES
