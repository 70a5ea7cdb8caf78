"""The loss of quantised pages in a real model: python -m benches.real_model_quality FOLDER

FOLDER holds a model that mlx-lm loads. It computes in float32, so that "fp16" pages hold its own
numbers bit for bit, and what is compared with them has lost nothing else. The figures in the
documents are of SmolLM2-135M-Instruct, whose weights of 4 bits (GGUF, Q4_1) were made float32.

Three texts come with Python: the source of a module, its reference, and the changes of IDLE. Each
gives as many contexts of 2,048 tokens, which are read in the steps of `quantised_quality`.
`loss_percent` is how much larger the perplexity is than with "fp16" pages, with its standard error
over contexts.

Contexts run in two processes, as nothing here is a time; each writes the results file anew.
"""

import argparse
import multiprocessing
import sysconfig
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm import load

from benches.cache_kinds import KINDS
from benches.quantised_quality import STEP, TOKENS, all_log_probs, compared, nats
from benches.results_file import write_result
from paged_kv import PagePool

CONTEXTS_OF_A_TEXT = 3
FORMATS = ("fp16", "q8", "q4")

Figures = dict[str, Any]


def texts() -> dict[str, str]:
    """What is read, by name."""
    library = Path(sysconfig.get_path("stdlib"))
    return {
        "source of statistics": (library / "statistics.py").read_text(encoding="utf-8"),
        "reference of the language": "\n\n".join(topics.values()),
        "changes of IDLE": (library / "idlelib" / "NEWS.txt").read_text(encoding="utf-8"),
    }


@cache
def loaded(folder: str) -> tuple[Any, Any]:
    """A model in float32, and its tokenizer."""
    model, tokenizer = load(folder)[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def losses(folder: str, text: str, number: int) -> dict[str, float]:
    """Nats a token of one context of a text, with pages of each format."""
    model, tokenizer = loaded(folder)
    tokens = tokenizer.encode(texts()[text])[number * TOKENS :][: TOKENS + 1]
    assert len(tokens) == TOKENS + 1, f"{text} is too short"
    return {
        name: nats(all_log_probs(model, KINDS[name](model), tokens), tokens[1:]) for name in FORMATS
    }


def figures_of(model: str, done: list[dict[str, float]]) -> Figures:
    """What a results file holds of the contexts that are done."""
    of_formats = {name: [context[name] for context in done] for name in FORMATS}
    return {
        "model": model,
        "backend": PagePool(1, max_bytes=1 << 20).stats().backend,
        "blas": BLAS,
        "texts": list(texts()),
        "contexts": len(done),
        "tokens": len(done) * TOKENS,
        "step": STEP,
        "rows": {name: compared(of, of_formats["fp16"]) for name, of in of_formats.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what quantised pages of a model lose.")
    parser.add_argument("folder", type=Path, help="a model that mlx-lm loads")
    parser.add_argument("--name", help="what documents call it (default: the folder's name)")
    arguments = parser.parse_args()
    model = arguments.name or arguments.folder.name
    done: list[dict[str, float]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as processes:
        running = [
            processes.submit(losses, str(arguments.folder), text, number)
            for number in range(CONTEXTS_OF_A_TEXT)
            for text in texts()
        ]
        for context in as_completed(running):
            done.append(context.result())
            print(done[-1], flush=True)
            if len(done) > 1:  # a standard error needs two
                print(f"written to {write_result('real_model_quality', figures_of(model, done))}")


if __name__ == "__main__":
    main()
