"""What real models find again in quantised pages: python -m benches.real_recall [NAME ...]

Paragraphs of Python's reference, and five times between them, at even distances, a sentence with a
code of five digits and a tool call in JSON with an id, a number and a price. Each cache reads that
once. Then the model is asked for each code and for each call, behind a copy of the cache:

    needle    "The code of the red door is" and the code
    call      the call's name, and then its arguments to the end

An answer is right if each of its tokens is the likeliest behind the ones before, so that greedy
decoding would give it. Models compute in float32, and caches are those of
`benches.real_model_quality`. A row is one model, one task, one number of tokens and one cache, over
all depths and texts:

    right             answers, of `answers`
    right_of_exact    of them, those that are right with "fp16" pages too
    tokens_percent    of all tokens of the right answers, those that are the likeliest

Texts run in two processes, as nothing here is a time; the results file is written anew after each.
"""

from benches.openblas import BLAS

import copy
import json
import random
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import mlx.core as mx

from benches.models import load_model, read
from benches.real_model_quality import STEP, asked_models, caches_of
from benches.results_file import write_result
from benches.two_processes import finished

LENGTHS, TEXTS = (1024, 2048, 4096, 7168), 3
COLOURS = ("red", "green", "blue", "white", "black")
CITIES = ("oslo", "lima", "cairo", "quito", "delhi")

Figures = dict[str, Any]


class Question(NamedTuple):
    """What is asked for, as tokens."""

    task: str
    asked: list[int]
    answer: list[int]


class Part(NamedTuple):
    """Of one text: for each cache, and then each question, which tokens of the answer are the
    likeliest."""

    questions: list[str]
    likeliest: dict[str, list[list[bool]]]


def text_of(tokenizer: Any, length: int, number: int) -> tuple[list[int], list[Question]]:
    """A text of about `length` tokens with codes and calls, and the questions about it."""
    rng = random.Random(f"{length} {number}")

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    found, questions = [], []
    for colour, city in zip(COLOURS, CITIES, strict=True):
        sentence, code = f"The code of the {colour} door is", f" {rng.randrange(10_000, 100_000)}."
        arguments = {
            "id": f"{rng.getrandbits(32):08x}",
            "seats": rng.randrange(1000),
            "price": round(rng.uniform(1, 100), 2),
        }
        call = json.dumps({"name": f"book_{city}", "arguments": arguments})
        name, _, rest = call.partition(' "arguments"')
        found.append(encoded(f"\n\n{sentence}{code}\n\n{call}\n\n"))
        asked = f"\n\nWhat is the code of the {colour} door? {sentence}"
        questions += [
            Question("needle", encoded(asked), encoded(code)),
            Question("call", encoded(f"\n\n{name}"), encoded(f' "arguments"{rest}')),
        ]
    prose = encoded("\n\n".join(topics.values()))
    piece = (length - sum(map(len, found))) // (len(found) + 1)
    at = rng.randrange(len(prose) - length)
    text = encoded(tokenizer.bos_token or "")
    for each in [*found, []]:
        text += prose[at : at + piece] + each
        at += piece
    return text, questions


def likeliest(model: Any, cache: list[Any], question: Question) -> list[bool]:
    """Whether each token of the answer is the likeliest behind the ones before."""
    tokens = [*question.asked, *question.answer]
    logits = model(mx.array([tokens[:-1]]), cache=copy.deepcopy(cache))[0]
    found: Any = mx.argmax(logits[-len(question.answer) :], axis=-1)
    return [own == right for own, right in zip(found.tolist(), question.answer, strict=True)]


def part_of(name: str, length: int, number: int) -> Part:
    """What each cache lets a model find in one text."""
    model, tokenizer = load_model(name)
    text, questions = text_of(tokenizer, length, number)
    found = {}
    caches = caches_of(model, length)
    # Where "auto" recodes pages, they are those of others.
    del caches["auto"]
    for cache_name, cache in caches.items():
        read(model.model, cache, text, STEP)
        found[cache_name] = [likeliest(model, cache, each) for each in questions]
    return Part([each.task for each in questions], found)


def row_of(parts: list[Part], task: str, cache: str) -> Figures:
    """The figures of one cache over texts."""
    pairs = [
        (own, exact)
        for part in parts
        for kind, own, exact in zip(
            part.questions, part.likeliest[cache], part.likeliest["fp16"], strict=True
        )
        if kind == task
    ]
    tokens = [each for own, _ in pairs for each in own]
    return {
        "cache": cache,
        "answers": len(pairs),
        "right": sum(all(own) for own, _ in pairs),
        "right_of_exact": sum(all(own) and all(exact) for own, exact in pairs),
        "tokens_percent": 100 * sum(tokens) / len(tokens),
    }


def figures_of(done: dict[tuple[str, int], list[Part]]) -> Figures:
    """What the results file holds of the texts that are done."""
    rows = [
        {"model": model, "task": task, "tokens": length, **row_of(parts, task, cache)}
        for (model, length), parts in sorted(done.items())
        for task in ("needle", "call")
        for cache in parts[0].likeliest
    ]
    return {"blas": BLAS, "step": STEP, "texts": TEXTS, "rows": rows}


def main() -> None:
    names = asked_models("Measure what models find in quantised pages.")
    done: dict[tuple[str, int], list[Part]] = {}
    calls = [
        (name, length, number) for length in LENGTHS for name in names for number in range(TEXTS)
    ]
    for (name, length, _), part in finished(part_of, calls):
        done.setdefault((name, length), []).append(part)
        print(f"{name}, {length}")
        write_result("real_recall", figures_of(done))


if __name__ == "__main__":
    main()
