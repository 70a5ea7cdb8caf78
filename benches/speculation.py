"""Times batches with drafts: python -m benches.speculation

All in float32. Sides that are compared take turns, prompts are cached before, and figures are
medians of the ratios within a turn.

    look_up  SmolLM2, a batch with prompt look-up, which adapts, beside the batch without drafts.
             Tasks: to repeat a paragraph word for word, to continue a list of records, and to write
             a text's facts as JSON of a schema, each until the model ends or for 128 tokens
    model    stdlib-llama behind about 2,048 tokens of source, a batch whose draft is the model's
             own first 5 of 6 layers, 4 tokens in every step, beside mlx-lm's
             speculative_generate_step on the same prompts, one after the other; accepted tokens a
             step are compared too
"""

from benches.openblas import BLAS

import copy
import json
import random
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from benches.models import contexts, load_model, read
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


def copying(number: int) -> str:
    """A paragraph of Python's reference to repeat."""
    paragraphs = [
        paragraph
        for topic in topics.values()
        for paragraph in topic.strip().split("\n\n")
        if 300 < len(paragraph) < 900 and "\n   " not in paragraph
    ]
    step = len(paragraphs) // max(ROWS)
    return f"Repeat this text word for word:\n\n{paragraphs[number * step]}"


def records(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """People, drawn by chance."""
    names, cities = (
        "Anna Boris Chen Dalia Emil Farah Goran Hana",
        "Oslo Lima Cairo Quito Delhi Paris",
    )
    return [
        {
            "id": rng.randrange(10_000),
            "name": rng.choice(names.split()),
            "city": rng.choice(cities.split()),
            "age": rng.randrange(18, 80),
        }
        for _ in range(count)
    ]


def listing(number: int) -> str:
    """A list of records to continue."""
    lines = map(json.dumps, records(random.Random(number), 12))
    return "Continue this list of records:\n\n" + "\n".join(lines)


def extracting(number: int) -> str:
    """A text whose facts are to be written as JSON of a schema, behind one example."""
    types = {"id": "integer", "name": "string", "city": "string", "age": "integer"}
    items = {"type": "object", "properties": {key: {"type": each} for key, each in types.items()}}
    schema = {"type": "array", "items": items}
    rng = random.Random(f"extracting {number}")
    example, people = records(rng, 1), records(rng, 4)
    return (
        f"Write JSON of this schema: {json.dumps(schema)}\n\nText: {sentences(example)}\n"
        f"JSON: {json.dumps(example)}\n\nText: {sentences(people)}\nJSON:"
    )


def sentences(people: list[dict[str, Any]]) -> str:
    """The records as sentences."""
    sentence = "{name} (number {id}) is {age} years old and lives in {city}."
    return " ".join(sentence.format(**each) for each in people)


TASKS: dict[str, Callable[[int], str]] = {
    "a paragraph to repeat": copying,
    "a list to continue": listing,
    "JSON of a schema": extracting,
}


def task_prompts(tokenizer: Any, make: Callable[[int], str]) -> Prompts:
    """A chat for each row."""
    chats = [[{"role": "user", "content": make(number)}] for number in range(max(ROWS))]
    return [tokenizer.apply_chat_template(each, add_generation_prompt=True) for each in chats]


def caching(model: Any, prompts: Prompts, head: Any = None) -> PagedCacheFactory:
    """A factory that has these prompts."""
    factory = PagedCacheFactory(model, max_bytes="1GB", head=head)
    for *prompt, _ in prompts:
        factory.insert_cache(prompt, read(model, factory.make_cache(), prompt))
    return factory


class Batch:
    """Generates for prompts whose pages are cached; keeps what the last generator counted, and how
    many tokens it gave."""

    def __init__(self, factory: PagedCacheFactory, prompts: Prompts, **options: Any) -> None:
        self._factory, self._prompts, self._options = factory, prompts, options
        self.generator: Any = None
        self.tokens = 0

    def run(self, make: Callable[..., BatchGenerator]) -> None:
        generator = self.generator = make(**self._options)
        caches = [self._factory.fetch_cache(prompt)[0] for prompt in self._prompts]
        generator.insert_segments(
            [[prompt[-1:]] for prompt in self._prompts],
            caches=caches,
            all_tokens=[prompt[:-1] for prompt in self._prompts],
        )
        self.tokens = 0
        while responses := generator.next_generated():
            self.tokens += len(responses)


class RowByRow:
    """mlx-lm's speculative decoding on its own caches, which hold the prompts."""

    def __init__(self, model: Any, draft: Any, prompts: Prompts) -> None:
        self._models = model, draft
        self._prompts = prompts
        # Of the model, and behind it of the draft.
        self._caches = [
            read(model, make_prompt_cache(model), prompt)
            + read(draft, make_prompt_cache(draft), prompt)
            for *prompt, _ in prompts
        ]
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


def of_look_up(
    model: Any, factory: PagedCacheFactory, prompts: Prompts, stop: list[list[int]]
) -> dict[str, Any]:
    """A batch with prompt look-up beside the same without drafts."""
    batch = Batch(factory, prompts, max_tokens=NEW_TOKENS, stop_tokens=stop)
    without, with_drafts = in_turns(
        partial(batch.run, partial(BatchGenerator, model)),
        partial(batch.run, partial(SpeculativeBatchGenerator, model, NGramDraft())),
        repetitions=REPETITIONS,
    )
    counts = batch.generator.counts
    return {
        "tokens": batch.tokens,
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
    batch = Batch(factories[0], prompts, max_tokens=MODEL_TOKENS)
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


def look_up() -> dict[str, Any]:
    """Prompt look-up in each task."""
    model, tokenizer = load_model("smollm2")
    stop = [[token] for token in tokenizer.eos_token_ids]
    found = {}
    for task, make in TASKS.items():
        prompts = task_prompts(tokenizer, make)
        factory = caching(model, prompts)
        for rows in ROWS:
            found[f"{task}_{rows}"] = of_look_up(model, factory, prompts[:rows], stop)
            print(task, rows, found[f"{task}_{rows}"], flush=True)
    return found


def draft_model() -> dict[str, Any]:
    """A draft model behind source."""
    model, tokenizer = load_model("stdlib-llama")
    draft = first_layers(model, DRAFT_LAYERS)
    prompts = [piece[:CONTEXT] for piece in contexts(tokenizer, CONTEXT, max(ROWS))]
    factories = [caching(each, prompts) for each in (model, draft)]
    found = {}
    for rows in ROWS:
        found[str(rows)] = of_models(model, draft, factories, prompts[:rows])
        print(rows, found[str(rows)], flush=True)
    return found


def main() -> None:
    figures = {
        "blas": BLAS,
        "context": CONTEXT,
        "draft_layers": DRAFT_LAYERS,
        "look_up": look_up(),
        "model": draft_model(),
    }
    write_result("speculation", figures)


if __name__ == "__main__":
    main()
