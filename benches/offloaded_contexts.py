"""Contexts that memory does not hold: python -m benches.offloaded_contexts [NAME ...]

Real models in float32 read 7,168 tokens of a text, then decode 128 one by one, with as many of them
read as 1/8 of the context, while `max_bytes` holds 1/2, 1/3 or 1/4 of its pages and steps wait for
those that they want, or not. Rows are of one model, over the texts of `benches.real_model_quality`:

    loss      how much larger the perplexity of the 128 is than with exact attention, in percent,
              and its standard error over blocks of 32 tokens, beside the same choice from memory
    fetched   pages of a layer that a step read from the file, and left out because they were late,
              in the mean
    ms        of a step, in the mean, and of one that reads all from memory
"""

import argparse
import math
import tempfile
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx

from benches.chosen_quality import BEFORE, read_by
from benches.heldout_text import model_in_float32
from benches.real_model_quality import KINDS, text_of
from benches.real_models.folders import MODELS
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.page_format import PAGE_SIZE

MEASURED, BLOCK, SHARE = 128, 32, 8
PARTS = (2, 3, 4)

Figures = dict[str, Any]


def decoded(factory: PagedCacheFactory, model: Any, tokens: list[int]) -> Figures:
    """The nats of each token behind those that are read at once, and what a step takes."""
    cache = read_by(factory, model, tokens[:BEFORE])
    before, nats = factory.stats(), []
    start = perf_counter()
    for at in range(BEFORE, len(tokens) - 1):
        logits = model(mx.array([[tokens[at]]]), cache=cache)[0, 0]
        own: Any = mx.logsumexp(logits) - logits[tokens[at + 1]]
        nats.append(own.item())
    ms, after = 1000 * (perf_counter() - start) / len(nats), factory.stats()
    return {
        "nats": nats,
        "ms": ms,
        "fetched": (after.pages_fetched - before.pages_fetched) / len(nats),
        "late": (after.pages_late - before.pages_late) / len(nats),
    }


def work(name: str, kind: str) -> dict[str, Figures]:
    """Of each way, by its label."""
    model, tokenizer = model_in_float32(name)
    tokens = text_of(kind, tokenizer)[: BEFORE + MEASURED + 1]
    read = BEFORE // SHARE
    chosen = PagedCacheFactory(model, read_tokens=read, max_bytes="4GB")
    found = {
        "exact": decoded(PagedCacheFactory(model, max_bytes="4GB"), model, tokens),
        "all in memory": decoded(chosen, model, tokens),
    }
    pages = -(-len(tokens) // PAGE_SIZE) * chosen.pool.groups[0].written_block_bytes
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            for waits in (True, False):
                factory = PagedCacheFactory(
                    model,
                    read_tokens=read,
                    max_bytes=pages // part + chosen.pool.slack,
                    offload=Path(folder),
                    wait_for_pages=waits,
                )
                label = f"1/{part} in memory, {'waiting' if waits else 'not waiting'}"
                found[label] = decoded(factory, model, tokens)
    return found


def row_of(name: str, label: str, parts: list[dict[str, Figures]]) -> Figures:
    blocks = [
        mean(part[label]["nats"][at : at + BLOCK]) - mean(part["exact"]["nats"][at : at + BLOCK])
        for part in parts
        for at in range(0, MEASURED, BLOCK)
    ]
    means = {key: mean(part[label][key] for part in parts) for key in ("fetched", "late", "ms")}
    return {
        "model": name,
        "kept": label,
        "loss_percent": 100 * math.expm1(mean(blocks)),
        "standard_error_percent": 100 * stdev(blocks) / math.sqrt(len(blocks)),
        **means,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure contexts that memory does not hold.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    names = parser.parse_args().names or list(MODELS)
    done: dict[str, list[dict[str, Figures]]] = {}
    for (name, kind), part in finished(work, [(name, kind) for kind in KINDS for name in names]):
        done.setdefault(name, []).append(part)
        rows = [row_of(each, label, parts) for each, parts in done.items() for label in parts[0]]
        figures = {"blas": BLAS, "before": BEFORE, "read_share": SHARE, "rows": rows}
        path = write_result("offloaded_contexts", figures)
        print(f"{name}, {kind}: {path.name}", flush=True)


if __name__ == "__main__":
    main()
