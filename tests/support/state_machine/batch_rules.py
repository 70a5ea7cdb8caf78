"""Rules that work on batches of caches, in any order."""

import gc
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
)

from paged_kv import PoolExhausted
from paged_kv.allocator.errors import RollbackError
from tests.support.invariants import assert_invariants, live_rows
from tests.support.state_machine import batches as held
from tests.support.state_machine.batches import TEXTS, Batch, Home, Steps, continued
from tests.support.state_machine.rows import Row
from tests.support.state_machine.worlds import World

BATCHES: Bundle[Batch] = Bundle("batches")
Batches = Batch | MultipleResults[Batch]
"""What a rule adds to these: one, or none."""
COUNTS = st.sampled_from([1, 1, 2, 3, 19, 32, 33, 100, 101, 255, 256, 257, 512, 700])
LENGTHS = st.lists(st.integers(0, 300), min_size=4, max_size=4)
INDEX = st.integers(0, 3)
LONGEST, MOST_ROWS, MOST_BATCHES = 2000, 4, 6


class BatchRules(RuleBasedStateMachine):
    def start(self, world: World) -> None:
        """Begin with one factory, before any other rule."""
        # A loaded cache goes to the latest pool with the same settings; free others.
        gc.collect()
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="paged-kv-machine-"))
        self.steps = Steps(world.model, world.oracle)
        self.homes: list[Home] = []
        self.held: list[Batch] = []
        self.saved = 0
        self.open_home()

    def open_home(self) -> Home:
        factory = self.world.new_factory(self.folder / "store")
        self.homes.append(Home(factory.pool, self.world.formats, factory))
        return self.homes[-1]

    def open_homes(self) -> list[Home]:
        return [home for home in self.homes if home.is_open]

    def hold(self, batch: Batch) -> Batch:
        self.held.append(batch)
        if len(self.held) > MOST_BATCHES:
            self.let_go(self.held[0])
        return batch

    def let_go(self, batch: Batch) -> None:
        self.held = [each for each in self.held if each is not batch]
        batch.layers, batch.rows = [], []

    @rule(target=BATCHES, home=INDEX, rows=st.integers(1, 3), text=st.integers(0, 2), count=COUNTS)
    def begin(self, home: int, rows: int, text: int, count: int) -> Batches:
        """A new prompt cache takes a batch of any size."""
        at = self.homes[home % len(self.homes)]
        if at.factory is None or not at.is_open:
            return multiple()
        batch = Batch(at.factory.make_cache(), [], at)
        # A mask reserves the blocks of each sequence in turn. If there are not enough for all,
        # layers before the first with pages have already changed.
        rows = 1 if batch.arrays else rows
        batch.rows = [Row.begun(at.formats, [0] * at.pool.num_layers) for _ in range(rows)]
        taken = self.steps.take(batch, [[row, *TEXTS[text][:count]] for row in range(rows)])
        return self.hold(batch) if taken else multiple()

    @rule(batch=BATCHES, count=COUNTS, turn=st.sampled_from([0, 0, 1, 2]), late=st.booleans())
    def step(self, batch: Batch, count: int, turn: int, late: bool) -> None:
        if batch.rows and batch.longest + count <= LONGEST:
            steps = [continued(row.tokens, count, turn) for row in batch.rows]
            self.steps.take(batch, steps, late=late)

    @rule(batch=BATCHES, lengths=LENGTHS, is_left=st.booleans(), late=st.booleans())
    def padded_step(self, batch: Batch, lengths: list[int], is_left: bool, late: bool) -> None:
        lengths = lengths[: len(batch.rows)]
        if any(lengths) and batch.longest + max(lengths) <= LONGEST:
            steps = [continued(row.tokens, n) for row, n in zip(batch.rows, lengths, strict=True)]
            # Left padding is possible only before the first token.
            is_left = is_left and not batch.longest and not batch.arrays
            self.steps.take(batch, steps, is_left=is_left, late=late)

    @rule(batch=BATCHES, count=st.integers(1, 6))
    def generate(self, batch: Batch, count: int) -> None:
        if batch.rows and batch.longest + count <= LONGEST and all(r.tokens for r in batch.rows):
            self.steps.generate(batch, count)

    @rule(batch=BATCHES, counts=st.lists(st.integers(0, 400), min_size=4, max_size=4))
    def trim(self, batch: Batch, counts: list[int]) -> None:
        """Trim as far as windows allow, or expect an error."""
        if batch.arrays or not batch.rows:
            return
        counts = counts[: len(batch.rows)]
        windows = batch.home.pool.windows
        asked = [min(n, len(row.tokens)) for n, row in zip(counts, batch.rows, strict=True)]
        if all(n <= row.rollback(windows) for n, row in zip(asked, batch.rows, strict=True)):
            for cache in batch.paged:
                assert cache.trim_per_sequence(counts) == asked
            for row, count in zip(batch.rows, counts, strict=True):
                row.trim(count)
        else:
            before = batch.lengths()
            for cache in batch.paged:
                with pytest.raises(RollbackError):
                    cache.trim_per_sequence(counts)
            assert batch.lengths() == before

    @rule(batch=BATCHES)
    def ask(self, batch: Batch) -> None:
        """The most tokens that can be trimmed."""
        if batch.arrays:
            return
        rows = [(row.rollback(batch.home.pool.windows), len(row.tokens)) for row in batch.rows]
        for n in {0, 1, *(most for most, _ in rows), *(most + 1 for most, _ in rows)}:
            answer = all(min(n, length) <= most for most, length in rows)
            assert all(cache.can_trim(n) == answer for cache in batch.paged)

    @rule(target=BATCHES, batch=BATCHES)
    def fork(self, batch: Batch) -> Batches:
        return self.hold(batch.fork()) if batch.rows else multiple()

    @rule(target=BATCHES, batch=BATCHES, index=INDEX)
    def extract(self, batch: Batch, index: int) -> Batches:
        if not batch.rows:
            return multiple()
        return self.hold(batch.extract(index % len(batch.rows)))

    @rule(target=BATCHES, first=BATCHES, second=BATCHES)
    def merge(self, first: Batch, second: Batch) -> Batches:
        return self.hold(held.merged([first, second])) if _fit(first, second) else multiple()

    @rule(batch=BATCHES, other=BATCHES)
    def extend(self, batch: Batch, other: Batch) -> None:
        if batch is not other and _fit(batch, other):
            for cache, more in zip(batch.layers, other.layers, strict=True):
                cache.extend(more)
            batch.rows += other.rows
            self.let_go(other)

    @rule(batch=BATCHES, indices=st.lists(INDEX, max_size=3))
    def filter(self, batch: Batch, indices: list[int]) -> None:
        kept = [index % len(batch.rows) for index in indices] if batch.rows else []
        if not kept:
            self.let_go(batch)
            return
        for cache in batch.layers:
            cache.filter(kept)
        batch.rows = [batch.rows[index].copy() for index in kept]

    @rule(batch=BATCHES)
    def drop(self, batch: Batch) -> None:
        self.let_go(batch)

    @rule(target=BATCHES, batch=BATCHES)
    def save_and_load(self, batch: Batch) -> Batches:
        if not batch.rows or not all(row.tokens for row in batch.rows):
            return multiple()
        # MLX reads a file lazily, so each cache gets its own file.
        self.saved += 1
        path = self.folder / f"saved-{self.saved}.safetensors"
        loaded = held.save_and_load(batch, path, self.homes)
        return multiple() if loaded is None else self.hold(loaded)

    @rule(batch=BATCHES, bits=st.sampled_from([4, 8]))
    def convert(self, batch: Batch, bits: int) -> None:
        """As mlx-lm does with `kv_bits`, at any moment."""
        if self.world.name != "table" or not batch.rows:
            return
        if batch.home.formats.first == f"q{bits}" and not all(r.is_found for r in batch.rows):
            # Convert back to the first format.
            return
        is_whole = True
        try:
            for cache in batch.paged:
                cache.to_quantized(group_size=32, bits=bits)
        except PoolExhausted:
            is_whole = False
        for row in batch.rows:
            row.convert(f"q{bits}", is_whole=is_whole)

    @rule()
    def look(self) -> None:
        """Not after every step: reading a batch as one step writes its pending steps."""
        self.steps.settle()
        for batch in list(self.held):
            self.steps.look(batch)

    @invariant()
    def counts_agree(self) -> None:
        for home in self.homes:
            home.pool.check()
            stats = home.pool.stats()
            assert_invariants(stats, home.pool.budget.mapped)
            assert stats.bytes_mapped <= home.pool.budget.max_bytes

    @invariant()
    def blocks_are_those_of_sequences(self) -> None:
        for home in self.homes:
            if self._differing(home):
                gc.collect()
                assert not self._differing(home)

    def _differing(self, home: Home) -> list[str]:
        """The groups whose counts of blocks, or of slots of live tokens, differ from the
        sequences'."""
        home.pool.stats()
        sequences = {
            each for batch in self.held if batch.home is home for each in batch.paged[0].sequences
        }
        wrong = []
        for group in [group for group in home.pool.groups if group.is_open]:
            tables = [(each.table(group), each.context_lens[group.layers[0]]) for each in sequences]
            # A step that is still referred to may have recoded a page beside its sequences.
            tables += [(each, 256) for each in group.allocator.tables if each.is_scratch]
            stats = group.stats()
            blocks = {block for table, _ in tables for block in table.blocks}
            if stats.blocks_used != len(blocks):
                wrong.append(f"{stats.blocks_used} blocks are used, and {len(blocks)} held")
            if group.window is None:
                idle = sum(
                    each.last_block_slots + each.out_of_window_slots for each in stats.formats
                )
                used = sum(each.used * each.page_size for each in stats.formats) - idle
                if used != (live := sum(live_rows(tables, 256).values())):
                    wrong.append(f"{used} rows are used, and {live} hold tokens")
        return wrong

    def teardown(self) -> None:
        self.look()
        for batch in list(self.held):
            self.let_go(batch)
        gc.collect()
        self.counts_agree()
        for home in self.homes:
            assert home.pool.stats().blocks_used == 0, "blocks are used by nobody"
            if home.factory is not None:
                home.factory.close()
        shutil.rmtree(self.folder)


def _fit(first: Batch, second: Batch) -> bool:
    """Whether two batches can be merged."""
    rows = len(first.rows) + len(second.rows)
    return bool(first.rows and second.rows) and first.home is second.home and rows <= MOST_ROWS
