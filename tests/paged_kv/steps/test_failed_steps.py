"""A step in which anything fails has no effect, and can be repeated.

The n-th of the calls that map, copy, write, evaluate and attend raises an error in a step, for
every n until the step succeeds. Then the step is repeated. It and all later steps must compute what
they compute where nothing failed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from paged_kv import PagedKVCache, PagePool
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.pool.layer_kinds import Window
from paged_kv.steps.recognised_arrays import placeholder
from tests.support.dense_attention import dense_attention
from tests.support.failures import ERRORS, Failures
from tests.support.layer_caches import caches_of

KV_HEADS, Q_HEADS, DIM, SCALE = 1, 2, 32, 32**-0.5
NUMBERS = np.random.default_rng(5).standard_normal((4001, DIM), dtype=np.float32)
PAGE_BYTES = 2 * KV_HEADS * 256 * DIM * 4
WINDOWS = {0: Window(300, 100), 2: Window(20, 20)}
Floats = npt.NDArray[Any]


def numbers(tokens: list[int], shift: int) -> Floats:
    found: Floats = NUMBERS[(np.array(tokens, np.int64) * 7 + shift) % len(NUMBERS)]
    return found


@dataclass(eq=False)
class Batch:
    """Caches of all layers, and the tokens of each sequence."""

    layers: list[PagedKVCache]
    rows: list[list[int]]

    def fork(self) -> Batch:
        return Batch(copy.deepcopy(self.layers), [list(row) for row in self.rows])

    def step(self, count: int) -> list[Floats]:
        """Take a step of as many tokens in all layers; returns what each layer attends to. If it
        fails, the batch is as before."""
        steps = [
            [row * 1000 + len(tokens) + at for at in range(count)]
            for row, tokens in enumerate(self.rows)
        ]
        outputs = [self._attended(cache, steps) for cache in self.layers]
        for tokens, step in zip(self.rows, steps, strict=True):
            tokens += step
        return outputs

    def _attended(self, cache: PagedKVCache, steps: list[list[int]]) -> Floats:
        layer, count = cache.layer, len(steps[0])
        mask = cache.make_mask(count, window_size=_window_of(cache))
        keys, values = (
            mx.array(np.stack([numbers(step, layer + shift) for step in steps])[:, None])
            for shift in (0, 100)
        )
        queries = mx.array(np.stack([_queries(step, layer) for step in steps]))
        read = cache.update_and_fetch(keys, values)
        return np.array(paged_attention(queries, *read, cache, SCALE, mask))

    def expected(self, layer: int, count: int, window: int | None) -> Floats:
        """What the latest tokens of each sequence attend to, in float64."""
        rows = [
            dense_attention(
                _queries(tokens[-count:], layer).astype(np.float64),
                numbers(tokens, layer)[None].astype(np.float64),
                numbers(tokens, layer + 100)[None].astype(np.float64),
                scale=SCALE,
                causal=True,
                window=window,
                sinks=None,
            )
            for tokens in self.rows
        ]
        return np.stack(rows)


def _window_of(cache: PagedKVCache) -> int | None:
    window = cache.pool.windows.get(cache.layer)
    return None if window is None else window.size


def _queries(tokens: list[int], layer: int) -> Floats:
    return np.stack([numbers(tokens, layer + 200 + head) for head in range(Q_HEADS)])


@dataclass(frozen=True)
class History:
    """Numbers of tokens of the steps before the one that fails, of that and of those after it.

    It may be the step of a fork, which shares the pages before it; pages that leave a window may
    stay cached, and some tokens may be taken back before it.
    """

    before: tuple[int, ...]
    step: int
    then: tuple[int, ...] = (1,)
    rows: int = 1
    is_fork: bool = False
    caches: bool = False
    trimmed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class World:
    """A history up to the step that is to fail."""

    pool: PagePool
    batch: Batch
    original: Batch | None

    @classmethod
    def of(cls, history: History) -> World:
        options = {"max_bytes": 60 * PAGE_BYTES, **history.options}
        pool = PagePool(3, **options)
        # The last layer gathers its keys and values.
        pool.attending = pool.attending_in_decode = frozenset({0, 1})
        layers = caches_of(pool, history.rows)
        for sequence in layers[0].sequences:
            sequence.caches_out_of_window = history.caches
        batch = Batch(layers, [[] for _ in range(history.rows)])
        for count in history.before:
            batch.step(count)
        for cache in batch.layers if history.trimmed else ():
            cache.trim(history.trimmed)
        for tokens in batch.rows:
            del tokens[len(tokens) - history.trimmed :]
        original = None
        if history.is_fork:
            original, batch = batch, batch.fork()
        return cls(pool, batch, original)

    def go_on(self, history: History) -> list[Floats]:
        """All that is computed from the step on."""
        found = self.batch.step(history.step)
        for count in history.then:
            found += self.batch.step(count)
        for original in [self.original] if self.original else []:
            for count in history.then:
                found += original.step(count)
        found += [np.array(part) for cache in self.batch.layers for part in cache.keys_and_values()]
        found += self._cached_out_of_window()
        self.pool.check()
        return found

    def _cached_out_of_window(self) -> list[Floats]:
        """The words of the pages that stay cached behind their windows."""
        return [
            np.array(group.pages[layer].page(cached.block), np.float64)
            for sequence in self.batch.layers[0].sequences
            for group, pages in sequence.out_of_window.items()
            for _, cached in sorted(pages.items())
            if cached.block is not None
            for layer in group.layers
        ]

    def blocks_used(self) -> int:
        gc.collect()
        return self.pool.stats().blocks_used


HISTORIES = {
    "first step": History((), 300),
    "fork": History((100,), 1, is_fork=True),
    "rings": History((500, 100), 60, options={"windows": WINDOWS}),
    "forked rings": History((500, 100), 60, is_fork=True, options={"windows": WINDOWS}),
    "step after a long one": History((100, 700), 1, (20, 1), options={"windows": WINDOWS}),
    "cached out of window": History(
        (100,) * 7, 100, (100, 1), rows=2, caches=True, options={"windows": WINDOWS}
    ),
    "pages that a long step passes": History(
        (300,), 700, (1, 20), caches=True, options={"windows": WINDOWS}
    ),
    "after pages that a long step passed": History(
        (300, 700), 1, (700, 1), caches=True, options={"windows": WINDOWS}
    ),
    "q4 fork": History((700, 1), 300, is_fork=True, options={"page_format": "q4"}),
    "q8 page that is written again": History(
        (700, 1), 100, (300,), trimmed=250, options={"page_format": "q8"}
    ),
}


def failed_step(history: History, failures: Failures, n: int) -> World | None:
    """A history whose step failed at its n-th call; None if it has fewer calls."""
    world = World.of(history)
    before = [list(tokens) for tokens in world.batch.rows]
    failures.left = n
    with contextlib.suppress(failures.error):
        world.batch.step(history.step)
    failures.left = -1
    if len(failures.calls) <= n:
        return None
    assert world.batch.rows == before, "nobody was told"
    return world


def compared(history: History, sound: World, world: World, expected: list[Floats]) -> None:
    """Compare a history that goes on after a failure with one in which nothing failed."""
    for a, b in zip(world.go_on(history), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert world.blocks_used() == sound.blocks_used()
    pool = world.pool
    world.batch.layers.clear()
    world.original = None
    gc.collect()
    assert (pool.stats().blocks_used, pool.stats().blocks_cached) == (0, 0), "blocks of nobody"
    pool.check()


SLOW = [
    ("first step", True, False),
    ("forked rings", True, False),
    ("step after a long one", False, True),
    ("cached out of window", False, False),
    ("after pages that a long step passed", True, False),
    ("q4 fork", False, True),
]
PLAIN = ("fork", False, False)
CASES = [
    pytest.param(*each, marks=pytest.mark.slow if each in SLOW else pytest.mark.soak)
    for each in itertools.product(HISTORIES, (False, True), (False, True))
    if each != PLAIN
]


@pytest.mark.parametrize(("name", "late", "lasts"), [PLAIN, *CASES])
@pytest.mark.slow
def test_it_can_be_repeated_whichever_call_fails(
    name: str, late: bool, lasts: bool, failures: Failures
) -> None:
    history = HISTORIES[name]
    sound = World.of(history)
    expected = sound.go_on(history)
    failures.is_late, failures.lasts = late, lasts
    for n in itertools.count():
        failures.error, failures.calls = ERRORS[n % len(ERRORS)], []
        world = failed_step(history, failures, n)
        if world is None:
            break
        try:
            compared(history, sound, world, expected)
        except BaseException as error:
            error.add_note(f"{failures.error.__name__} at call {n} of {failures.calls}")
            raise
    assert n > 8, "too few calls failed to show anything"


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["before its work", "after its work"])
def test_what_can_be_taken_back_afterwards_is_still_there(late: bool, failures: Failures) -> None:
    history = HISTORIES["rings"]
    failures.is_late = late
    for n in itertools.count():
        failures.calls = []
        world = failed_step(history, failures, n)
        if world is None:
            break
        batch = world.batch
        back = min(sequence.rollback for sequence in batch.layers[0].sequences)
        for cache in batch.layers:
            cache.trim(back)
        for tokens in batch.rows:
            del tokens[len(tokens) - back :]
        for layer, found in enumerate(batch.step(1)):
            expected = batch.expected(layer, 1, _window_of(batch.layers[layer]))
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"{failures.calls}")


@pytest.mark.slow
def test_a_ring_that_was_written_late_shows_what_it_holds(failures: Failures) -> None:
    """The step before was longer than its rings, and the one that fails has written it to them."""
    history = HISTORIES["step after a long one"]
    seen = 0
    for n in itertools.count():
        failures.calls = []
        world = failed_step(history, failures, n)
        if world is None:
            break
        for cache in (each for each in world.batch.layers if each.layer in WINDOWS):
            if cache.layer not in cache.sequences[0].unwritten:
                keys = np.array(cache.keys)[0, 0]
                tokens = world.batch.rows[0][-len(keys) :]
                np.testing.assert_array_equal(keys, numbers(tokens, cache.layer))
                seen += 1
    assert seen


def test_a_part_of_a_step_that_failed_is_not_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step over several quantised pages is attended to in parts. No later step, which may be
    another thread's, waits for a part of one that was undone."""
    world = World.of(HISTORIES["q4 fork"])
    groups = world.pool.groups

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(world.pool.backend), "attend", fail)
        with pytest.raises(MemoryError):
            world.batch.step(300)
    assert not any(pages.unwritten for group in groups for pages in group.pages.values())


@pytest.mark.parametrize("method", ["gather", "gather_tokens"])
def test_a_gather_that_fails_undoes_the_step(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention gathers where it cannot read pages."""
    world = World.of(HISTORIES["fork"])
    batch = world.batch
    batch.layers[0].make_mask(1)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(world.pool.backend), method, staticmethod(fail))
        keys = mx.ones((1, KV_HEADS, 1, DIM))
        read: Any = batch.layers[0].update_and_fetch(keys, keys)[0].read
        with pytest.raises(MemoryError):
            read.gather() if method == "gather" else read.gather_tokens(
                mx.array([[0]]), of_values=False
            )
    assert batch.layers[0].sequences[0].context_lens == [100] * 3
    for layer, found in enumerate(batch.step(1)):
        np.testing.assert_allclose(found, batch.expected(layer, 1, None), atol=1e-4)
    world.pool.check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.slow
def test_keys_that_cannot_be_computed_do_others_no_harm(attends: bool) -> None:
    world = World.of(HISTORIES["fork"])
    batch, original = world.batch, world.original
    assert original is not None
    if not attends:
        world.pool.attending = world.pool.attending_in_decode = frozenset()
    never = placeholder((1, KV_HEADS, 1, DIM), mx.float32)
    cache = batch.layers[0]

    def attended() -> mx.array:
        read = cache.update_and_fetch(never, never)
        return paged_attention(mx.zeros((1, Q_HEADS, 1, DIM)), *read, cache, SCALE, None)

    with pytest.raises(RuntimeError):
        mx.eval(attended())
    for each in (original, batch):
        for layer, found in enumerate(each.step(1)):
            np.testing.assert_allclose(found, each.expected(layer, 1, None), atol=1e-4)
    world.pool.check()
