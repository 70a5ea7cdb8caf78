"""Measures structured output: python -m benches.structured_output SUITE [--only-suite]

stdlib-llama, texts at temperature 2. SUITE is the folder tests/draft2020-12 of
JSON Schema's test suite; jsonschema's source package has it as json/tests/draft2020-12. Without
it that part keeps its last figures.

    suite       the suite's schemas that are taken, and those whose texts are all valid, of those
                with a text that ended by itself; and why the others are refused
    generated   the same of 2,000 schemas that are made by chance
    cost        tokens a second of 16 sequences with grammars beside the same without, in turns,
                and processor seconds, which other processes disturb less
    drafts      tokens a second with forced and looked-up drafts, beside none, under grammars
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import mlx.core as mx
from jsonschema import Draft202012Validator
from mlx_lm.sample_utils import make_sampler

from benches.generated_schemas import Schema, generated_schema
from benches.models import contexts, load_model
from benches.results_file import latest_figures, write_result
from paged_kv import NGramDraft, PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.bench.turns import ratio
from paged_kv.integrations.grammar.grammars import GrammarError, json_schema
from paged_kv.integrations.grammar.masked_steps import MaskedBatchGenerator
from paged_kv.integrations.grammar.processor import GrammarProcessor
from paged_kv.integrations.grammar.vocabulary import CompiledGrammar, Vocabulary

ROWS, GENERATED = 16, 2000
# Of texts, of which most are short: many at a time.
TEXT_ROWS, MOST_TOKENS = 64, 96
COST_TOKENS, CONTEXT, TURNS = 48, 16, 5
# It never ends by itself in so many tokens, and leaves some tokens no choice.
LONG: Schema = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "the_name": {"type": "string"},
            "arguments": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["the_name", "arguments"],
        "additionalProperties": False,
    },
}

# What messages say, the first that fits; and what that means.
CAUSES = {
    "Resource": "a reference to another document",
    "Unsatisfiable": "no value fits",
    "$dynamic": "$dynamicRef, $dynamicAnchor",
    '"if"': "if, then, else",
    '"not"': "not",
    '"contains"': "contains",
    "unevaluated": "unevaluatedItems, unevaluatedProperties beside others",
    "propertyNames": "propertyNames",
    "uniqueItems": "uniqueItems",
    "oneOf": "oneOf of schemas that the same value may fit",
    "patternProperty": "patternProperties that the same name matches",
}


class Bench:
    """The small model, and grammars for it."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load_model("stdlib-llama")
        self.vocabulary = Vocabulary(self.tokenizer)
        self.ends = [[token] for token in self.tokenizer.eos_token_ids]

    def validity(self, schemas: Iterable[Schema]) -> dict[str, Any]:
        """How many schemas are taken, how many of them have only valid texts, and why the others
        are refused."""
        taken: list[tuple[Schema, CompiledGrammar]] = []
        causes: Counter[str] = Counter()
        for schema in schemas:
            try:
                compiled = self.vocabulary.compiled(json_schema(schema))
                compiled.require_quick()
                taken.append((schema, compiled))
            except GrammarError as error:
                causes[cause_of(str(error))] += 1
        ended = invalid = 0
        faulty: set[int] = set()
        told: set[int] = set()
        for number, text in self._texts([compiled for _, compiled in taken]):
            ended += 1
            told.add(number)
            if not Draft202012Validator(taken[number][0]).is_valid(json.loads(text)):
                print("invalid:", json.dumps(taken[number][0])[:300], text[:200])
                invalid += 1
                faulty.add(number)
        return {
            "schemas": len(taken) + causes.total(),
            "taken": len(taken),
            "with_ended_texts": len(told),
            "only_valid": len(told - faulty),
            "ended_texts": ended,
            "invalid_texts": invalid,
            "refused": dict(causes.most_common()),
        }

    def _texts(self, grammars: list[CompiledGrammar]) -> Iterator[tuple[int, str]]:
        """The texts that end by themselves, each with the number of its grammar."""
        prompt, waiting = self.tokenizer.encode("x = "), iter(range(len(grammars)))
        mx.random.seed(0)
        generator: Any = MaskedBatchGenerator(
            self.model, stop_tokens=self.ends, completion_batch_size=TEXT_ROWS
        )
        rows: dict[int, tuple[int, list[int]]] = {}
        while True:
            for number in islice(waiting, TEXT_ROWS - len(rows)):
                (uid,) = generator.insert(
                    [prompt],
                    [MOST_TOKENS],
                    samplers=[make_sampler(2.0)],
                    logits_processors=[[GrammarProcessor(grammars[number].begin())]],
                )
                rows[uid] = number, []
            if not rows:
                return
            for response in generator.next_generated():
                number, tokens = rows[response.uid]
                if response.finish_reason is None:
                    tokens.append(response.token)
                    continue
                del rows[response.uid]
                if response.finish_reason == "stop":
                    yield number, self.tokenizer.decode(tokens)

    def costs(self) -> dict[str, Any]:
        """With grammars beside without, and with drafts beside without, in turns."""
        compiled = self.vocabulary.compiled(json_schema(LONG))
        prompts = contexts(self.tokenizer, CONTEXT, ROWS)
        factory = PagedCacheFactory(self.model)
        free: list[tuple[float, float]] = []
        masked: list[tuple[float, float]] = []
        drafted: list[tuple[float, float]] = []
        with factory:
            factory.install()
            for turn in range(TURNS + 1):
                sides = (
                    (free, self._run(prompts, None, None)),
                    (masked, self._run(prompts, compiled, None)),
                    (drafted, self._run(prompts, compiled, NGramDraft())),
                )
                for times, took in sides:
                    if turn:
                        times.append(took)
        sides_of = (free, masked, drafted)
        wall, cpu = [[[each[at] for each in side] for side in sides_of] for at in (0, 1)]
        return {
            "rows": ROWS,
            "tokens_per_second": [round(ROWS * COST_TOKENS / median(side)) for side in wall],
            "grammar_cost": 1 - ratio(wall[0], wall[1]),
            "grammar_cost_of_processor_time": 1 - ratio(cpu[0], cpu[1]),
            "drafts_times_as_quick": ratio(wall[1], wall[2]),
        }

    def _run(
        self, prompts: list[list[int]], compiled: CompiledGrammar | None, draft: Any
    ) -> tuple[float, float]:
        """Seconds, and processor seconds, of a batch's tokens."""
        mx.random.seed(1)
        options: Any = {"completion_batch_size": ROWS, "stop_tokens": []}
        generator: Any = (
            MaskedBatchGenerator(self.model, **options)
            if draft is None
            else SpeculativeBatchGenerator(self.model, draft, **options)
        )
        sampler = make_sampler(1.0)
        generator.insert(
            prompts,
            [COST_TOKENS] * ROWS,
            samplers=[sampler] * ROWS,
            logits_processors=[
                [] if compiled is None else [GrammarProcessor(compiled.begin())] for _ in prompts
            ],
        )
        count = 0
        while count < ROWS:  # all prompts are computed
            count += len(generator.next_generated())
        began, cpu_began, done = time.perf_counter(), time.process_time(), 0
        while responses := generator.next_generated():
            done += len(responses)
        took = time.perf_counter() - began, time.process_time() - cpu_began
        # A few rows began before the last prompt was computed.
        scale = (ROWS * COST_TOKENS) / max(1, done)
        return took[0] * scale, took[1] * scale


def cause_of(message: str) -> str:
    """Why llguidance refuses a schema, from its message."""
    for said, cause in CAUSES.items():
        if said in message:
            return cause
    return "other"


def suite_schemas(folder: Path) -> Iterator[Schema]:
    """The suite's schemas that are objects, without those of optional parts."""
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            if isinstance(group["schema"], dict):
                yield group["schema"]


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", type=Path)
    parser.add_argument("--only-suite", action="store_true", help="leave the other figures")
    options = parser.parse_args()
    bench, figures = Bench(), latest_figures("structured output")
    if options.suite is not None:
        figures["suite"] = bench.validity(suite_schemas(options.suite))
        print(figures["suite"])
    if options.only_suite:
        write_result("structured output", figures)
        return
    figures["cost"] = bench.costs()
    print(figures["cost"])
    random = Random(0)
    figures["generated"] = bench.validity(generated_schema(random) for _ in range(GENERATED))
    print(figures["generated"])
    write_result("structured output", figures)


if __name__ == "__main__":
    main()
