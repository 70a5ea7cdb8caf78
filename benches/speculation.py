"""Times batches with drafts: python -m benches.speculation

stdlib-llama in float32, on held-out source of about 2,048 tokens. Sides that are compared take
turns, prompts are cached before, and figures are medians of the ratios within a turn.

    texts    new: pieces of files; repeating: a piece, the same piece again, and its beginning, as
             when a file is edited
    ngram    a batch with prompt look-up, which adapts, beside the batch without drafts
    model    a batch whose draft is the model's own first 5 of 6 layers, 4 tokens in every step,
             beside mlx-lm's speculative_generate_step on the same prompts, one after the other;
             accepted tokens a step are compared too
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from benches.heldout_text import contexts, model_in_float32
from benches.results_file import write_result
from paged_kv import ModelDraft, NGramDraft, PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.bench.turns import in_turns, ratio, spread
from paged_kv.integrations.speculation.draft_lengths import FixedLengths

CONTEXT, NEW_TOKENS, MODEL_TOKENS, REPETITIONS = 2048, 128, 24, 3
DRAFT_LAYERS, DRAFT_TOKENS = 5, 4
ROWS = (1, 8)
Prompts = list[list[int]]


def first_layers(model: Any, count: int) -> Any:
    """A model of the first layers, which shares their weights."""
    draft = llama.Model(model.args)
    draft.model.embed_tokens, draft.model.norm = model.model.embed_tokens, model.model.norm
    draft.model.layers = model.model.layers[:count]
    return draft


def repeating(tokenizer: Any, count: int) -> Prompts:
    """Pieces of files, each written twice and begun a third time."""
    part = CONTEXT * 15 // 32
    pieces = contexts(tokenizer, part, count)
    return [[*piece, *piece, *piece[: CONTEXT - 2 * len(piece)]] for piece in pieces]


def cache_prompts(factory: PagedCacheFactory, model: Any, prompts: Prompts) -> None:
    for prompt in prompts:
        cache = factory.make_cache()
        model(mx.array([prompt[:-1]]), cache=cache)
        mx.eval([layer.state for layer in cache])
        factory.insert_cache(prompt[:-1], cache)


class Batch:
    """Generates for prompts whose pages are cached; keeps what the last generator counted."""

    def __init__(self, factory: PagedCacheFactory, prompts: Prompts, tokens: int) -> None:
        self._factory, self._prompts, self._tokens = factory, prompts, tokens
        self.generator: Any = None

    def run(self, make: Callable[..., BatchGenerator]) -> None:
        generator = self.generator = make(max_tokens=self._tokens)
        caches = [self._factory.fetch_cache(prompt)[0] for prompt in self._prompts]
        generator.insert_segments(
            [[prompt[-1:]] for prompt in self._prompts],
            caches=caches,
            all_tokens=[prompt[:-1] for prompt in self._prompts],
        )
        while generator.next_generated():
            pass


class RowByRow:
    """mlx-lm's speculative decoding on its own caches, which hold the prompts."""

    def __init__(self, model: Any, draft: Any, prompts: Prompts) -> None:
        self._models = model, draft
        self._prompts = prompts
        self._caches = [self._read(prompt) for prompt in prompts]
        self.accepted = self.steps = 0

    def run(self) -> None:
        self.accepted = self.steps = 0
        for prompt, caches in zip(self._prompts, self._caches, strict=True):
            produced = speculative_generate_step(
                mx.array(prompt[-1:]),
                *self._models,
                max_tokens=MODEL_TOKENS,
                num_draft_tokens=DRAFT_TOKENS,
                prompt_cache=copy.deepcopy(caches),
            )
            for _, _, from_draft in produced:
                self.accepted += from_draft
                self.steps += not from_draft

    def _read(self, prompt: list[int]) -> list[Any]:
        caches = []
        for model in self._models:
            cache = make_prompt_cache(model)
            model(mx.array([prompt[:-1]]), cache=cache)
            mx.eval([layer.state for layer in cache])
            caches += cache
        return caches


def of_ngrams(model: Any, factory: PagedCacheFactory, prompts: Prompts) -> dict[str, Any]:
    """A batch with prompt look-up beside the same without drafts."""
    batch = Batch(factory, prompts, NEW_TOKENS)
    without, with_drafts = in_turns(
        partial(batch.run, partial(BatchGenerator, model)),
        partial(batch.run, partial(SpeculativeBatchGenerator, model, NGramDraft())),
        repetitions=REPETITIONS,
    )
    counts = batch.generator.counts
    return {
        "tokens": len(prompts) * NEW_TOKENS,
        "seconds_without": without,
        "seconds_with": with_drafts,
        "speed": ratio(without, with_drafts),
        "spread_without": spread(without),
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
    }


def of_models(
    model: Any, draft: Any, factories: list[PagedCacheFactory], prompts: Prompts
) -> dict[str, Any]:
    """A batch with a draft model beside mlx-lm's rows, one after the other."""
    batch = Batch(factories[0], prompts, MODEL_TOKENS)
    make = partial(
        SpeculativeBatchGenerator,
        model,
        ModelDraft(draft, factories[1]),
        num_draft_tokens=DRAFT_TOKENS,
        lengths=FixedLengths(),
    )
    rows = RowByRow(model, draft, prompts)
    theirs, ours = in_turns(rows.run, partial(batch.run, make), repetitions=REPETITIONS)
    counts = batch.generator.counts
    return {
        "tokens": len(prompts) * MODEL_TOKENS,
        "seconds_mlx_lm": theirs,
        "seconds_batch": ours,
        "speed": ratio(theirs, ours),
        "spread_mlx_lm": spread(theirs),
        "accepted_a_step": counts.accepted_tokens / counts.drafts,
        "mlx_lm_accepted_a_step": rows.accepted / rows.steps,
    }


def main() -> None:
    model, tokenizer = model_in_float32("stdlib-llama")
    draft = first_layers(model, DRAFT_LAYERS)
    factories = [PagedCacheFactory(each, max_bytes="1GB") for each in (model, draft)]
    figures: dict[str, Any] = {"context": CONTEXT, "draft_layers": DRAFT_LAYERS}
    texts = {
        "repeating": repeating(tokenizer, max(ROWS)),
        "new": [piece[:CONTEXT] for piece in contexts(tokenizer, CONTEXT, max(ROWS))],
    }
    for text, prompts in texts.items():
        for each, factory in zip((model, draft), factories, strict=True):
            cache_prompts(factory, each, prompts)
        for rows in ROWS:
            found = figures[f"{text}_{rows}"] = {
                "ngram": of_ngrams(model, factories[0], prompts[:rows]),
                "model": of_models(model, draft, factories, prompts[:rows]),
            }
            print(text, rows, found, flush=True)
    print(write_result("speculation", figures))


if __name__ == "__main__":
    main()
