"""Measures two things in turns, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turns(*works: Callable[[], object], repetitions: int) -> list[list[float]]:
    """The seconds of each of `works`, called one after the other again and again.

    What disturbs the machine then disturbs all of them. A first call of each is not counted.
    """
    for work in works:
        work()
    rounds = [[seconds(work) for work in works] for _ in range(repetitions)]
    return [list(column) for column in zip(*rounds, strict=True)]


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median of the ratios of times taken in one turn."""
    return median(one / other for one, other in zip(numerator, denominator, strict=True))


def spread(times: list[float]) -> float:
    """How far a side's own halves of turns lie apart: the ratio of their medians, at least 1."""
    first, second = sorted((median(times[::2]), median(times[1::2])))
    return second / first


FEWEST_TURNS = 6
# A side whose own halves lie further apart says more about the machine than about the caches.
MOST_SPREAD = 1.25


@dataclass(frozen=True)
class Measurement:
    """One comparison.

    Attributes:
        name: what was measured, at what size.
        unit: "s" or "bytes".
        mlx_lm: the median with mlx-lm's caches.
        paged: the median with pages.
        times_better: the median of the ratios within a turn, mlx-lm's to pages'.
        spread: how far a side's own halves of turns lie apart, at least 1.
        turns: how many turns there were.
    """

    name: str
    unit: str
    mlx_lm: float
    paged: float
    times_better: float
    spread: float = 1.0
    turns: int = 1

    @property
    def verdict(self) -> str:
        """Which of the two is better, and by how much."""
        if self.spread > MOST_SPREAD:
            return f"too noisy to tell (spread {self.spread:.2f})"
        factor = max(self.times_better, 1 / self.times_better)
        times = f"{factor:.2f}"
        # Who is 1.00 times as good is not better.
        if factor <= self.spread or times == "1.00":
            return "equal"
        return f"{'paged_kv' if self.times_better > 1 else 'mlx-lm'}, {times} times"


@dataclass(frozen=True)
class Skipped:
    """A comparison that was not made, and why."""

    name: str
    reason: str


def compared(
    name: str, mlx_lm: Callable[[], object], paged: Callable[[], object], most_s: float
) -> Measurement | Skipped:
    """The seconds of both, called in turns for about `most_s` seconds; skipped if that allows too
    few turns. A first call of each is not counted."""
    first = seconds(lambda: (mlx_lm(), paged()))
    if first * FEWEST_TURNS > most_s:
        return Skipped(name, f"a turn takes {first:.1f} s, and there are {most_s:.0f}")
    end = time.perf_counter() + most_s
    stock: list[float] = []
    ours: list[float] = []
    while len(stock) < FEWEST_TURNS or time.perf_counter() < end:
        stock.append(seconds(mlx_lm))
        ours.append(seconds(paged))
    noise = max(spread(stock), spread(ours))
    return Measurement(
        name, "s", median(stock), median(ours), ratio(stock, ours), noise, len(stock)
    )
