"""mlx-lm's batch, which keeps the promises of an `Admission` up to date."""

from __future__ import annotations

from typing import Any

from mlx_lm.generate import BatchGenerator

from paged_kv.integrations.admission import Admission


class PromisingBatch(BatchGenerator):
    """Promises each request that is inserted all that it may grow to, until it is finished or
    removed: nothing else knows of requests that end because their client has gone.

    Args:
        model: see `BatchGenerator`.
        admission: what lets requests begin.
        options: for `BatchGenerator`.
    """

    def __init__(self, model: Any, *, admission: Admission[Any], **options: Any) -> None:
        super().__init__(model, **options)
        self._admission = admission

    def insert_segments(
        self, segments: Any, max_tokens: Any = None, caches: Any = None, all_tokens: Any = None,
        *others: Any, **options: Any,
    ) -> Any:  # fmt: skip
        """See `BatchGenerator`; the server gives `max_tokens` and `all_tokens`."""
        # Before the insertion, which takes the segments apart.
        tokens = [
            len(cached) + sum(map(len, rest)) + most
            for rest, most, cached in zip(segments, max_tokens, all_tokens, strict=True)
        ]
        uids = super().insert_segments(segments, max_tokens, caches, all_tokens, *others, **options)
        for uid, count in zip(uids, tokens, strict=True):
            self._admission.promise(uid, count)
        return uids

    def next(self) -> Any:
        """See `BatchGenerator`."""
        prompt_responses, responses = super().next()  # type: ignore[no-untyped-call]
        for response in responses:
            if response.finish_reason is not None:
                self._admission.end(response.uid)
        return prompt_responses, responses

    def remove(self, uids: Any, return_prompt_caches: bool = False) -> Any:
        """See `BatchGenerator`."""
        caches = super().remove(uids, return_prompt_caches)  # type: ignore[no-untyped-call]
        for uid in uids:
            self._admission.end(uid)
        return caches
