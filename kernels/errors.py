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
