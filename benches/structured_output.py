"""Measures structured output: python -m benches.structured_output SUITE

stdlib-llama, texts at temperature 2. SUITE is the folder tests/draft2020-12 of
JSON Schema's test suite; jsonschema's source package has it as json/tests/draft2020-12.

    suite       the suite's schemas that are taken, and those whose texts are all valid, of those
                with a text that ended by itself; and why the others are refused
    generated   the same of 2,000 schemas that are made by chance
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from jsonschema import Draft202012Validator
from mlx_lm.sample_utils import make_sampler

from benches.generated_schemas import Schema, generated_schema
from benches.models import load_model
from benches.results_file import write_result
from paged_kv.integrations.grammar.grammars import GrammarError, json_schema
from paged_kv.integrations.grammar.processor import GrammarProcessor, MaskedBatchGenerator
from paged_kv.integrations.grammar.vocabulary import CompiledGrammar, Vocabulary

GENERATED = 2000
# Of texts, of which most are short: many at a time.
TEXT_ROWS, MOST_TOKENS = 64, 96
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
    parser.add_argument("suite", type=Path)
    suite = suite_schemas(parser.parse_args().suite)
    bench, random = Bench(), Random(0)
    generated = (generated_schema(random) for _ in range(GENERATED))
    figures = {"suite": bench.validity(suite), "generated": bench.validity(generated)}
    write_result("structured output", figures)


if __name__ == "__main__":
    main()
