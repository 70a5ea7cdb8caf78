"""Asks a model for the answers to some prompts in random schedules, and compares their bits with
those that each prompt gives alone."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from paged_kv.server.engine.sampling import RandomSampler
from tests.integrations.batching.test_preemption import factory_of_blocks
from tests.support.zoo import small_model

NEW_TOKENS = 40
# Each needs up to four; so many do not hold all of them.
BLOCKS = 7
# MLX computes experts on CPUs in float32 alone.
_MODELS = [
    *((kind, each) for kind in ("qwen3", "plamo2") for each in (mx.bfloat16, mx.float16)),
    *(("gemma3_text", each) for each in (mx.bfloat16, mx.float32)),
    *((kind, mx.float32) for kind in ("qwen3", "qwen3_next", "deepseek_v3", "qwen3_moe")),
]
# The heads of this one are too small for codes.
CASES = [
    (kind, dtype, page_format)
    for kind, dtype in _MODELS
    for page_format in ("fp16", "q4")
    if (kind, page_format) != ("deepseek_v3", "q4")
]
"""Models of the zoo: dense, with windows, hybrid, latent, with experts; their numbers and pages."""

Bits = list[tuple[int, bytes]]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * at * at + 3 * at + 1 + seed) % 97 for at in range(length)]


# Some begin alike, some within a page; some end at a page's border, or a token behind it.
PROMPTS = [
    prompt(478),
    prompt(473, 1),
    prompt(700),
    prompt(300) + prompt(300, 2),
    prompt(257, 1),
    prompt(258),
    prompt(3, 4),
]


class Outcome(NamedTuple):
    """What schedules came to.

    Attributes:
        tokens: of the answers that were compared.
        differing: those of them that are others, or whose log-probabilities have another bit.
        hits: tokens of prompts that were found cached.
        preemptions: of sequences.
    """

    tokens: int = 0
    differing: int = 0
    hits: int = 0
    preemptions: int = 0

    def __add__(self, other: Any) -> "Outcome":
        return Outcome(*map(sum, zip(self, other, strict=True)))


class _Options:
    temperature, top_p, top_k, min_p = 1.0, 0.9, 4, 0.0
    xtc_probability, xtc_threshold = 0.0, 0.0


class Schedules:
    """Schedules of one model: with any company, with what memory and a store hold, with preemptions
    and a restart before each, and beside requests that are aborted.

    Args:
        kind: a model of the zoo, in `dtype`.
        page_format: of full pages.
        reproducible: as of a factory.
        folder: of the store.
    """

    def __init__(
        self, kind: str, dtype: mx.Dtype, page_format: str, folder: Path, *, reproducible: bool
    ) -> None:
        self._model: Any = small_model(kind)
        self._model.set_dtype(dtype)
        self._options: Any = {"page_format": page_format, "reproducible": reproducible}
        self._folder = folder
        # Nothing is kept without `keep_prompts`.
        with PagedCacheFactory(self._model, max_bytes=256 << 20, **self._options):
            self._alone = [self._answers([at], random.Random(at))[at] for at in range(len(PROMPTS))]

    def run(self, seed: int) -> Outcome:
        """Run one schedule."""
        chance, found = random.Random(seed), Outcome()
        factory = factory_of_blocks(self._model, BLOCKS, store=self._folder, **self._options)
        factory.decode_share = chance.choice([None, 0.5])
        factory.install(keep_prompts=True)
        for _ in range(3):
            asked = chance.sample(range(len(PROMPTS)), chance.randint(1, len(PROMPTS)))
            answers = self._answers(asked, chance, aborted=0.2)
            for at, bits in answers.items():
                pairs = list(zip(bits, self._alone[at], strict=True))
                found += Outcome(len(pairs), sum(one != other for one, other in pairs))
            if chance.random() < 0.3:
                factory.clear()
        stats = factory.stats()
        factory.close()
        return found + Outcome(hits=stats.prefix_hits, preemptions=stats.preemptions)

    def _answers(
        self, asked: list[int], chance: random.Random, aborted: float = 0.0
    ) -> dict[int, Bits]:
        """The tokens and log-probabilities for some prompts at once, but for those that are
        aborted."""
        sizes: Any = {
            "completion_batch_size": chance.choice([3, 8, 16]),
            "prefill_batch_size": 4,
            "prefill_step_size": chance.choice([100, 256, 2048]),
        }
        generator: Any = BatchGenerator(self._model, **sizes)
        options: Any = _Options()
        uids = generator.insert(
            [PROMPTS[each] for each in asked],
            max_tokens=[NEW_TOKENS] * len(asked),
            samplers=[RandomSampler(options, [], seed=each) for each in asked],
        )
        gone = [uid for uid in uids if chance.random() < aborted]
        when, steps = chance.randint(1, NEW_TOKENS // 2), 0
        found: dict[int, Bits] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for each in responses:
                each.prompt_cache = None
                logprobs = each.logprobs.astype(mx.float32)
                found[each.uid].append((each.token, bytes(memoryview(logprobs))))
            steps += 1
            if steps == when:
                generator.remove(gone)
        answers = zip(uids, asked, strict=True)
        return {at: found[uid] for uid, at in answers if uid not in gone}
