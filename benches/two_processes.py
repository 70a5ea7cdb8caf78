"""Runs the parts of a bench that measures no times in two processes."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Call = TypeVar("Call", bound=tuple[object, ...])
Part = TypeVar("Part")


def finished(work: Callable[..., Part], calls: Iterable[Call]) -> Iterator[tuple[Call, Part]]:
    """The arguments and the result of each call, as they finish. Each has a process of its own, so
    that its model is freed behind it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as processes:
        running = {processes.submit(work, *call): call for call in calls}
        for part in as_completed(running):
            yield running[part], part.result()
