"""Takes back the pages of ended sequences whose prompt caches nobody has asked for.

BatchGenerator hands an ended sequence's prompt cache out with the sequence's last response. Loops
such as mlx-lm's `batch_generate` keep that response until the next ones come. So the pages of a
sequence that has ended would stay in use just while another one waits for them to begin.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from mlx_lm.generate import GenerationBatch

from paged_kv.allocator.errors import PagedKVError
from paged_kv.integrations.batching.prompt_caches import first_paged
from paged_kv.pool.page_pool import PagePool


class PromptCacheTaken(PagedKVError):
    """The pages of a response's prompt cache were given to another sequence.

    Attributes:
        uid: the sequence whose response it is.
    """

    def __init__(self, uid: int) -> None:
        super().__init__(uid)
        self.uid = uid

    def __str__(self) -> str:
        return (
            f"the prompt cache of sequence {self.uid} was not read before its pages were needed by "
            "another sequence: read response.prompt_cache before the batch's next step, or raise "
            "max_bytes"
        )


class LastResponse(GenerationBatch.Response):
    """The last response of a sequence. `prompt_cache` stays once it is read."""

    is_unread = True

    @property
    def prompt_cache(self) -> list[Any] | None:
        """The sequence's prompt cache.

        Raises:
            PromptCacheTaken: it was not read before its pages were needed.
        """
        self.is_unread = False
        if "prompt_cache" not in self.__dict__:
            raise PromptCacheTaken(self.uid)
        found: list[Any] | None = self.__dict__["prompt_cache"]
        return found

    @prompt_cache.setter
    def prompt_cache(self, value: list[Any] | None) -> None:
        self.__dict__["prompt_cache"] = value

    def __repr__(self) -> str:
        # mlx-lm's would read the prompt cache.
        return f"{type(self).__name__}({self.uid=}, {self.token=}, {self.finish_reason=})"


class LastResponses:
    """The last responses of sequences with pages of one pool, as long as somebody holds them."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._responses: list[weakref.ref[LastResponse]] = []

    def note(self, responses: list[Any]) -> None:
        paged = [(each, first_paged(each.prompt_cache or [])) for each in responses]
        last = [each for each, first in paged if first is not None and first.pool is self._pool]
        if not last:
            return
        for response in last:
            # Its class is mlx-lm's or one derived from that, and callers may ask for it.
            response.__class__ = _kind_of_last(response.__class__)
        self._responses = [ref for ref in self._responses if _unread(ref) is not None]
        self._responses += map(weakref.ref, last)

    def take_back(self) -> bool:
        """Drop the prompt caches that nobody has read; whether there was one."""
        unread = [response for ref in self._responses if (response := _unread(ref)) is not None]
        for response in unread:
            response.__dict__.pop("prompt_cache", None)
        self._responses.clear()
        return bool(unread)


def _unread(ref: weakref.ref[LastResponse]) -> LastResponse | None:
    response = ref()
    return response if response is not None and response.is_unread else None


@cache
def _kind_of_last(kind: type) -> type:
    """The class of the last response of a sequence whose others have this class."""
    return type(kind.__name__, (LastResponse, kind), {"__qualname__": kind.__qualname__})
