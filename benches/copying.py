"""Copying from quantised contexts: python -m benches.copying

A model in float32 reads 1,920 tokens that it was not trained on (`heldout_text`), and then the same
tokens again. To predict them better the second time, it must find them through the keys, and read
them through the values, of pages that were quantised long ago.

The models are too small for more: with 16 bits too, neither continues a passage of 32 tokens from
its first 24, and so none can tell a needle from its context.

first    share of tokens of the text that are the likeliest to the model
repeat   that share of the repeated text
same     share of the repeated text where the likeliest token is that of 16-bit pages
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import mlx.core as mx

from benches.cache_kinds import KINDS, Caches
from benches.heldout_text import MODELS, contexts, model_in_float32
from benches.results_file import write_result

TOKENS, STEP = 1920, 480
COMPARED = ("fp16", "q8", "q4", "mlx-lm 8 bits", "mlx-lm 4 bits")


def likeliest(model: Any, cache: Caches, tokens: list[int]) -> list[int]:
    """The likeliest successor of each token."""
    found: list[int] = []
    for start in range(0, len(tokens), STEP):
        logits = model(mx.array([tokens[start : start + STEP]]), cache=cache)
        found += [int(token) for token in mx.argmax(logits[0], axis=-1)]
    return found


def share_of_equal(found: list[int], expected: list[int]) -> float:
    return sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)


def copies_of(name: str) -> dict[str, dict[str, float]]:
    model, tokenizer = model_in_float32(name)
    text = contexts(tokenizer, TOKENS, 1)[0][:TOKENS]
    rows: dict[str, dict[str, float]] = {}
    reference: list[int] = []
    for kind in COMPARED:
        found = likeliest(model, KINDS[kind](model), text + text)
        reference = reference or found
        rows[kind] = {
            "first": share_of_equal(found[: TOKENS - 1], text[1:]),
            "repeat": share_of_equal(found[TOKENS:-1], text[1:]),
            "same": share_of_equal(found[TOKENS:], reference[TOKENS:]),
        }
        print(name, kind, rows[kind], flush=True)
    return rows


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as processes:
        rows = dict(zip(MODELS, processes.map(copies_of, MODELS), strict=True))
    print(f"written to {write_result('copying', {'tokens': TOKENS, 'rows': rows})}")


if __name__ == "__main__":
    main()
