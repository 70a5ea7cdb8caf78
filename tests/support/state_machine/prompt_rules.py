"""Rules that look up, compute, insert, pin and forget prompts, in any order."""

import gc
from collections.abc import Hashable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import multiple, precondition, rule

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from tests.support.state_machine.batch_rules import BATCHES, INDEX, LONGEST, Batches, BatchRules
from tests.support.state_machine.batches import TEXTS, Batch, Home, continued
from tests.support.state_machine.rows import Row
from tests.support.state_machine.worlds import World

SALTS = st.sampled_from([None, None, None, "a"])
# Around the borders of pages, or anywhere.
ENDS = st.sampled_from(
    [1, 40, 255, 256, 257, 300, 301, 511, 512, 513, 600, 700, 769]
) | st.integers(1, 769)
PROMPTS = st.builds(
    lambda text, length, tail: [*TEXTS[text][:length], *range(1, 1 + tail)],
    st.integers(0, 2),
    ENDS,
    st.integers(0, 2),
)
STEP_SIZES = st.sampled_from([1024, 512, 256, 100])


@dataclass(frozen=True)
class Inserted:
    home: Home
    salt: Hashable
    tokens: list[int]
    rewritten: frozenset[int]


@dataclass(frozen=True, eq=False)
class Pin:
    """How many tokens a factory said that it keeps, and how many a prompt could begin with."""

    home: Home
    salt: Hashable
    tokens: list[int]
    pinned: int
    found: int

    def same_as(self, other: "Pin") -> bool:
        mine, theirs = (self.salt, self.tokens), (other.salt, other.tokens)
        return self.home is other.home and mine == theirs


class PromptRules(BatchRules):
    def start(self, world: World) -> None:
        super().start(world)
        self.inserted: list[Inserted] = []
        self.pins: list[Pin] = []
        self.computed(self.homes[0], TEXTS[0][:600], None, 256, keep=True)

    def home(self, number: int) -> Home:
        """An open factory; there always is one."""
        homes = self.open_homes()
        return homes[number % len(homes)]

    @rule(
        target=BATCHES,
        home=INDEX,
        prompt=PROMPTS,
        salt=SALTS,
        step_size=STEP_SIZES,
        keep=st.booleans(),
    )
    def prompt(
        self, home: int, prompt: list[int], salt: Hashable, step_size: int, keep: bool
    ) -> Batches:
        return self.computed(self.home(home), prompt, salt, step_size, keep)

    def computed(
        self, home: Home, prompt: list[int], salt: Hashable, step_size: int, keep: bool
    ) -> Batches:
        """Compute the part of a prompt that the factory does not know."""
        fits = home.pool.can_admit(len(prompt))
        batch = self.fetched(home, prompt, salt)
        while rest := prompt[len(batch.rows[0].tokens) :][:step_size]:
            if not self.steps.take(batch, [rest]):
                assert step_size > 256 or not fits, "what was admitted does not fit"
                break
        if keep and batch.rows[0].tokens:
            self.keep(batch, salt)
        return self.hold(batch) if batch.rows[0].tokens else multiple()

    @rule(
        target=BATCHES,
        home=INDEX,
        number=st.integers(0, 100),
        length=st.sampled_from([0, 0, 1, 40, 255, 256, 300, 512]),
        step_size=STEP_SIZES,
    )
    def again(self, home: int, number: int, length: int, step_size: int) -> Batches:
        """Ask for a prompt that was inserted once, or its beginning, followed by other tokens."""
        known = self.inserted[number % len(self.inserted)]
        prompt = [*known.tokens[: length or len(known.tokens)], 4, 5]
        return self.computed(self.home(home), prompt, known.salt, step_size, keep=False)

    def fetched(self, home: Home, prompt: list[int], salt: Hashable) -> Batch:
        assert home.factory is not None
        layers, cached = home.factory.fetch_cache(prompt, salt=salt)
        shared = [
            (common_prefix(prompt, each.tokens), each.rewritten)
            for each in self.inserted
            if each.salt == salt and (self.world.store or each.home is home)
        ]
        longest = max([common for common, _ in shared], default=0)
        assert cached <= min(len(prompt) - 1, longest), "nobody inserted that"
        rewritten = frozenset(
            page for common, pages in shared for page in pages if page * PAGE_SIZE < common
        )
        batch = Batch(layers, [], home)
        (sequence,) = batch.paged[0].sequences
        pool = sequence.pool
        written = [sequence.layers.written(pool.group_of(at)) for at in range(pool.num_layers)]
        batch.rows = [Row.begun(home.formats, written, prompt[:cached], rewritten)]
        return batch

    @rule(batch=BATCHES, index=INDEX, salt=SALTS, length=st.sampled_from([0, 0, 0, -1, -300, 5]))
    def insert(self, batch: Batch, index: int, salt: Hashable, length: int) -> None:
        """Insert a sequence's tokens, only the first ones, or more than it holds."""
        if not batch.rows or not batch.home.is_open:
            return
        one = batch if len(batch.rows) == 1 else batch.extract(index % len(batch.rows))
        self.keep(one, salt, length)

    @rule(
        home=INDEX,
        text=st.integers(0, 2),
        ends=st.sets(ENDS, min_size=2, max_size=4),
        partings=st.lists(st.integers(0, 700), max_size=2),
        salt=SALTS,
    )
    def grow(
        self, home: int, text: int, ends: set[int], partings: list[int], salt: Hashable
    ) -> None:
        """A prompt is inserted again and again as it grows, and others part from it before and
        behind its ends."""
        batch = self.fetched(self.home(home), [*TEXTS[text][: min(ends)], 2], salt)
        row = batch.rows[0]
        for end in sorted(ends):
            # A prompt may have been found that is longer than the first end.
            step = TEXTS[text][len(row.tokens) : end]
            if step and self.steps.take(batch, [step]):
                self.keep(batch, salt)
        for parting in [*partings, *(end + 3 for end in ends)]:
            found = self.fetched(batch.home, [*TEXTS[text][:parting], 2, 2, 2], salt)
            self.steps.take(found, [[2]])

    @rule(batch=BATCHES, count=st.sampled_from([40, 300, 520]), salt=SALTS)
    def branch(self, batch: Batch, count: int, salt: Hashable) -> None:
        """Two prompts continue differently from the end of one, and others from the end of every
        block of both."""
        if len(batch.rows) != 1 or not batch.home.is_open or batch.longest + count > LONGEST:
            return
        both = batch.extract(0), batch.extract(0)
        for turn, one in enumerate(both, start=1):
            self.steps.take(one, [continued(one.rows[0].tokens, count, turn)])
        for one in both:
            self.keep(one, salt)
        for one in both:
            for end in range(256, len(one.rows[0].tokens), 256):
                found = self.fetched(batch.home, [*one.rows[0].tokens[:end], 2], salt)
                self.steps.take(found, [[2]])

    def keep(self, batch: Batch, salt: Hashable, change: int = 0) -> None:
        factory, row = batch.home.factory, batch.rows[0]
        assert factory is not None
        tokens = row.tokens + [3] * change if change >= 0 else row.tokens[:change]
        known = min(len(tokens), len(row.tokens))
        self.inserted.append(Inserted(batch.home, salt, tokens[:known], row.rewritten))
        promised = factory.insert_cache(tokens, batch.layers, salt=salt)
        assert promised <= known
        # If two prompts end in the same slot of a page after the same blocks, the index keeps a
        # window that begins in the page before for only one of them. Recurrent states are those
        # after all tokens. A prompt that ends within a quantised page is found up to that page's
        # beginning.
        is_kept = known == len(row.tokens) or not batch.arrays
        if not batch.home.pool.windows and is_kept and not self._may_end_quantised(row, salt):
            assert promised == known
        if row.is_found:
            # One more token, because a lookup never returns the last token of a prompt.
            batch = self.fetched(batch.home, [*tokens[:known], 2], salt)
            found = len(batch.rows[0].tokens)
            assert found >= promised, f"{promised} tokens were inserted, and {found} are found"
            self.steps.take(batch, [[2]])

    def _may_end_quantised(self, row: Row, salt: Hashable) -> bool:
        """Whether the tokens of the prompt that was inserted last end within a page that its row,
        before a trim, or an earlier prompt may have filled."""
        *earlier, latest = self.inserted
        tokens = latest.tokens
        page_end = -(-len(tokens) // 256) * 256
        filled = [
            len(each.tokens)
            for each in earlier
            if each.salt == salt and len(tokens) == common_prefix(each.tokens, tokens)
        ]
        return row.full != "fp16" and max([*row.written, *filled]) >= page_end > len(tokens)

    @rule(home=INDEX, prompt=PROMPTS, salt=SALTS)
    def pin(self, home: int, prompt: list[int], salt: Hashable) -> None:
        at = self.home(home)
        assert at.factory is not None
        pinned = at.factory.pin(prompt, salt=salt)
        found = self.fetched(at, [*prompt[:pinned], 2], salt).rows[0].tokens
        self.pins.append(Pin(at, salt, prompt, pinned, len(found)))

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 100))
    def unpin(self, number: int) -> None:
        """A pinned prompt stays until then. Of pins of the same tokens the latest is removed
        first."""
        one = self.pins[number % len(self.pins)]
        pin = [each for each in self.pins if each.same_as(one)][-1]
        self.pins.remove(pin)
        found = self.fetched(pin.home, [*pin.tokens[: pin.pinned], 2], pin.salt).rows[0].tokens
        assert len(found) >= pin.found, "what was pinned is not found"
        assert pin.home.factory is not None
        assert pin.home.factory.unpin(pin.tokens, salt=pin.salt) == pin.pinned

    @rule(home=INDEX, what=st.sampled_from(["compact", "collect", "clear"]))
    def tidy(self, home: int, what: str) -> None:
        at = self.home(home)
        assert at.factory is not None
        if what == "compact":
            at.pool.compact()
        elif what == "collect":
            gc.collect()
        else:
            at.factory.clear()
            assert len(at.factory.prefixes) == 0 or any(pin.home is at for pin in self.pins)
