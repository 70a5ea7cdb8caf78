"""Keeps the prompts of a BatchGenerator in the prefix cache.

A prompt is kept as soon as it is computed, for those that come while its answer is generated, and
once more with its answer, which the next turn of a conversation begins with.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from mlx_lm.generate import BatchGenerator

from paged_kv.integrations.batching.shared_prefill import Reuses
from paged_kv.integrations.batching.shortages import Responses

_ATTACHED = "paged_kv_kept_prompts"


class KeptPrompts:
    """The prompts of one BatchGenerator that are kept. It takes its steps here from now on.

    Args:
        generator: BatchGenerator, whose steps are as they will stay otherwise.
        factory: makes the caches of its model.
    """

    def __init__(self, generator: BatchGenerator, factory: Reuses) -> None:
        self._generator: Any = weakref.proxy(generator)
        self._factory = factory
        self._uids: set[int] = set()
        name = BatchGenerator._next.__name__
        self._step = getattr(generator, name)
        setattr(generator, name, self.step)
        setattr(generator, _ATTACHED, self)

    @classmethod
    def of(cls, generator: BatchGenerator, factory: Reuses) -> KeptPrompts:
        """Those of a generator, which has none before the first call."""
        return getattr(generator, _ATTACHED, None) or cls(generator, factory)

    def add(self, uids: Iterable[int]) -> None:
        """Keep the prompts of these sequences, whose caches hold only tokens of their prompts."""
        self._uids.update(uids)

    def step(self) -> Responses:
        """The generator's step."""
        prompts, generated = self._step()
        for response in prompts:
            if response.end_of_prompt and response.uid in self._uids:
                self._keep_prompt(response.uid)
        for response in generated:
            if response.finish_reason is not None and response.uid in self._uids:
                self._uids.remove(response.uid)
                # Not the attribute: whoever has read it keeps the pages, see `LastResponse`.
                cache = vars(response).get("prompt_cache")
                if cache is not None:
                    self._factory.insert_cache(response.all_tokens, cache)
        return prompts, generated

    def _keep_prompt(self, uid: int) -> None:
        cache, tokens = self._generator.extract_cache([uid])[uid]
        # All but the last token, which a prompt computes again. A single one has no states yet.
        if len(tokens) > 2:
            self._factory.insert_cache(tokens[:-1], cache)
