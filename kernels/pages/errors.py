"""Defines the exceptions of page memory, knows MLX's own for want of it, and logs each warning
once."""

import logging
from functools import cache

logger = logging.getLogger("paged_kv")


# What the errors of MLX's allocators say: Metal's, which also bounds the size and the number of
# buffers, CUDA's, and Metal's where a kernel runs.
_SHORTAGES = (
    "Unable to allocate",
    "greater than the maximum allowed buffer size",
    "Resource limit",
    "out of memory",
    "Insufficient Memory",
)


def is_shortage(error: BaseException) -> bool:
    """Whether MLX or Python raised this error because there is no memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _SHORTAGES)


@cache
def warn_once(message: str) -> None:
    """Log a warning unless this process has logged it before."""
    logger.warning(message)


class ThreadConflict(RuntimeError):
    """A thread needs pages that another thread has yet to compute with; nothing was changed.

    MLX computes a lazy array only in the thread that made it. So a thread cannot write a page that
    another thread's lazy array still has to read, and it cannot compute that array instead. Code
    that keeps to this rule refers to it here.
    """

    def __init__(self) -> None:
        super().__init__(
            "another thread has read these pages and has not computed the result: call mx.eval in "
            "that thread and retry, or give each thread a PagedCacheFactory of its own"
        )


class QuantisedPage(ValueError):
    """A step was to be written to a quantised page; nothing was changed."""

    def __init__(self) -> None:
        super().__init__(
            "a step is written to pages of 16 bits, got a quantised page: copy it into one first"
        )


class PagesNotRead(RuntimeError):
    """A model did not pass keys and values to attention, as it did in its factory's trial step;
    nothing was changed."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} got keys and values that stand for pages, and did not pass them to attention "
            "in the same step, as it did in the factory's trial step: make the factory with "
            "PagedCacheFactory(model, always_gather=True)"
        )
