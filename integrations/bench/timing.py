"""Times things that are compared, in turns."""

import time
from collections.abc import Callable
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
