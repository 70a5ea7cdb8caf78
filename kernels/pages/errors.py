"""The exceptions of page memory."""


class ThreadConflict(RuntimeError):
    """A second thread needs pages that another thread has not finished with; nothing was changed.

    MLX computes a lazy array only in the thread that made it. So a thread cannot write a page that
    another thread's lazy array still has to read, and it cannot compute that array instead.
    """

    def __init__(self) -> None:
        super().__init__(
            "another thread has read these pages and has not computed the result: call mx.eval in "
            "that thread and retry, or give each thread a PagedCacheFactory of its own"
        )


class PagesNotRead(RuntimeError):
    """A model did not pass keys and values on to attention, as it did when its factory tried it
    out; nothing was changed."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} got keys and values that stand for pages, and did not pass them on to "
            "attention in the same step, as it did when the factory tried it out: make its factory "
            "with PagedCacheFactory(model, always_gather=True)"
        )
