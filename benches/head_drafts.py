"""Compares drafts: python -m benches.head_drafts [--smollm2-head FOLDER]

All in float32. Prompt look-up, a draft model and a prediction head draft for one row and for eight,
on tasks of trained models: stdlib-llama continues source that it has not seen, behind 512 tokens;
its draft model is its own first 5 of 6 layers. SmolLM2 has two tasks of `benches.speculation`; its
head is one that `benches.train_head` has made, in FOLDER. For each:

    accepted  drafted tokens that the model accepted in a step, where 4 are drafted in every step
    speed     of a batch whose drafts adapt, as by default, beside the batch without drafts: the
              median of the ratios within a turn
    bound     the same if steps took as long as reading their bytes, by arithmetic: the tokens of a
              step, times the weights and pages that a step without drafts reads, by what one reads
              that drafts 4 tokens and verifies them
"""

from benches.openblas import BLAS

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

from benches.models import contexts, load_model
from benches.results_file import write_result
from benches.speculation import (
    DRAFT_LAYERS,
    ROWS,
    TASKS,
    Batch,
    Prompts,
    caching,
    first_layers,
    task_prompts,
)
from paged_kv import (
    HeadDraft,
    ModelDraft,
    NGramDraft,
    PagedCacheFactory,
    SpeculativeBatchGenerator,
    embedded_model,
    load_head,
)
from paged_kv.integrations.bench.turns import in_turns, ratio, spread
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.speculation.drafts import Draft

CONTEXT, DRAFTED = 512, 4
# By model: tokens to generate, and repetitions.
LENGTHS = {"stdlib-llama": (192, 7), "smollm2": (96, 3)}

Figures = dict[str, Any]


class Drafting(NamedTuple):
    """One way to draft.

    Attributes:
        factory: of the model.
        draft: what drafts.
        token_bytes: what drafting one token of all rows reads, pages aside.
        layers: how many layers have pages of their own for it.
    """

    factory: PagedCacheFactory
    draft: Draft
    token_bytes: int
    layers: int


def nbytes(module: Any) -> int:
    flat: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in flat)


def ways(model: Any, head_folder: Path | None, draft: Any, prompts: Prompts) -> dict[str, Drafting]:
    """The ways to draft, whose prompts are cached."""
    plain = caching(model, prompts)
    found = {"look-up": Drafting(plain, NGramDraft(), 0, 0)}
    if draft is not None:
        of_model = ModelDraft(draft, caching(draft, prompts))
        found["draft model"] = Drafting(plain, of_model, nbytes(draft), len(draft.layers))
    if head_folder is not None:
        head = load_head(head_folder)
        factory = caching(model, prompts, head)
        output = nbytes(model.model.embed_tokens)
        found["head"] = Drafting(factory, HeadDraft(factory), nbytes(head) + output, 1)
    return found


def row_of(
    model: Any, way: Drafting, prompts: Prompts, stop: list[list[int]], lengths: tuple[int, int]
) -> Figures:
    """The figures of one way for a batch of these prompts."""
    new_tokens, repetitions = lengths
    options: Figures = {"max_tokens": new_tokens, "stop_tokens": stop}
    plain = caching(model, prompts)
    without, drafted = Batch(plain, prompts, **options), Batch(way.factory, prompts, **options)
    make: Callable[..., Any] = partial(SpeculativeBatchGenerator, model, way.draft)
    times = in_turns(
        partial(without.run, partial(BatchGenerator, model)),
        partial(drafted.run, make),
        repetitions=repetitions,
    )
    fixed = partial(make, num_draft_tokens=DRAFTED, lengths=FixedLengths())
    drafted.run(fixed)
    counts = drafted.generator.counts
    accepted = counts.accepted_tokens / max(1, counts.drafts)
    tokens = sum(map(len, prompts)) + len(prompts) * new_tokens // 2
    of_layer = plain.pool.groups[0].size.block_bytes / 256 / len(model.layers)
    step = nbytes(model) + tokens * of_layer * len(model.layers)
    drafting = DRAFTED * (way.token_bytes + tokens * of_layer * way.layers)
    return {
        "seconds_without": times[0],
        "seconds_with": times[1],
        "speed": ratio(times[0], times[1]),
        "spread_without": spread(times[0]),
        "accepted_a_step": accepted,
        "bound": (1 + accepted) * step / (step + drafting),
    }


def rows_of(
    name: str, model: Any, head: Path | None, draft: Any, prompts: Prompts, stop: list[list[int]]
) -> list[Figures]:
    """The rows of one task."""
    found = []
    lengths = LENGTHS[name.partition(",")[0]]
    for label, way in ways(model, head, draft, prompts).items():
        for count in ROWS:
            row = {"task": name, "draft": label, "rows": count}
            found.append(row | row_of(model, way, prompts[:count], stop, lengths))
            print(
                {key: each for key, each in found[-1].items() if "seconds" not in key}, flush=True
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare drafts.")
    parser.add_argument("--smollm2-head", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = load_model("stdlib-llama")
    prompts = [piece[:CONTEXT] for piece in contexts(tokenizer, CONTEXT, max(ROWS))]
    own_head = Path(embedded_model()) / "draft_head"
    draft = first_layers(model, DRAFT_LAYERS)
    rows = rows_of("stdlib-llama, source", model, own_head, draft, prompts, [])
    model, tokenizer = load_model("smollm2")
    stop = [[token] for token in tokenizer.eos_token_ids]
    for task in ("a paragraph to repeat", "JSON of a schema"):
        prompts = task_prompts(tokenizer, TASKS[task])
        rows += rows_of(f"smollm2, {task}", model, arguments.smollm2_head, None, prompts, stop)
    mx.synchronize()
    write_result("head_drafts", {"blas": BLAS, "drafted": DRAFTED, "rows": rows})


if __name__ == "__main__":
    main()
